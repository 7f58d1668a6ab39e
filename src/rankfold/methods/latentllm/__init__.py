"""LatentLLM and the local low-rank methods it is compared with; see :mod:`.method`."""

from .method import ASVD, SVD, SVDLLM, LatentLLM, RootCov

__all__ = ["ASVD", "SVD", "SVDLLM", "LatentLLM", "RootCov"]
