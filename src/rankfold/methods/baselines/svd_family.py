"""The local methods LatentLLM is compared with: its options set to what each of them does."""

from dataclasses import dataclass
from typing import ClassVar

from ...architectures import BlockView
from ..latentllm.method import LatentLLM


@dataclass(frozen=True)
class RootCov(LatentLLM):
    """Local low rank by root covariance, with block identity: LatentLLM without its joint forms."""

    name: ClassVar[str] = "rootcov"
    joint: str = "none"


@dataclass(frozen=True)
class SVDLLM(RootCov):
    """Root covariance by whitening, plain factors: what SVD-LLM (arXiv:2403.07378) does before its update step."""

    name: ClassVar[str] = "svd-llm"
    workspace: ClassVar[tuple[float, float]] = (1.0, 4.0)  # plain factors need no factor of a moment
    junction: str = "symmetric"


@dataclass(frozen=True)
class ASVD(SVDLLM):
    """Diagonal pre-conditioning by mean absolute activations to the power alpha: ASVD (arXiv:2312.05821)."""

    name: ClassVar[str] = "asvd"
    precondition: str = "l1"


@dataclass(frozen=True)
class SVD(SVDLLM):
    """Plain SVD of the weights."""

    name: ClassVar[str] = "svd"
    precondition: str = "identity"


@dataclass(frozen=True)
class FWSVD(SVDLLM):
    """SVD of the weights with every column weighed by the empirical Fisher of its entries: FWSVD (arXiv:2207.00112).

    The paper's rows: its weights multiply inputs from the right, so its rows are the inputs of a layer, columns here.
    Left out: training afterwards.
    """

    name: ClassVar[str] = "fwsvd"
    precondition: str = "fisher"


@dataclass(frozen=True)
class Bolaco(SVDLLM):
    """Principal components of what a layer sends: Bolaco (arXiv:2405.10616), without its search for ranks.

    ``y - m ~ U U^T (y - m)``, ``m`` the mean of ``y`` and ``U`` the leading eigenvectors of its pooled covariance, the
    mean of the covariances within single windows. So ``W`` becomes ``U (U^T W)``, and a bias takes ``(I - U U^T) m``; a
    layer without one gets one, a parameter for each output. With ``S`` the same covariance of the inputs, that of the
    outputs is ``W S W^T``, and this is the SVD in the metric ``S``. Values stay dense, as in the paper, unless
    ``modules`` names them. The authors' code pools groups of 32 windows. Left out: Bayesian optimisation of the ranks,
    which come from ``allocation``, and tuning.
    """

    name: ClassVar[str] = "bolaco"
    workspace: ClassVar[tuple[float, float]] = (3.5, 3.0)  # what varies within samples, and its factor
    features: ClassVar[bool] = True

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        there = super().supported_modules(architecture, view)
        return there if self.modules is not None else tuple(m for m in there if m != "v")
