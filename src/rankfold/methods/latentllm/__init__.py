"""LatentLLM: latent linear layers, jointly where modules act jointly."""

from .method import LatentLLM

__all__ = ["LatentLLM"]
