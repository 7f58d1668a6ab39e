"""LatentLLM: latent linear layers, jointly where modules act jointly."""

from .method import LatentLLM
from .variants import ASVD, FWSVD, SVD, SVDLLM, Bolaco, RootCov

__all__ = ["ASVD", "FWSVD", "SVD", "SVDLLM", "Bolaco", "LatentLLM", "RootCov"]
