"""LatentLLM: latent linear layers, jointly where modules act jointly."""

from .method import LatentLLM
from .variants import ASVD, SVD, SVDLLM, RootCov

__all__ = ["ASVD", "SVD", "SVDLLM", "LatentLLM", "RootCov"]
