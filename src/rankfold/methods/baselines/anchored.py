"""AA-SVD (arXiv:2604.02119): SVD of every layer on what really enters it, anchored at what the dense layer computes.

Shape legend: O outputs, N inputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from ...architectures import AttentionView, BlockView, Dense
from ...calibration.moments import BlockMoments, CrossMoment
from ...errors import OptionError
from ...linalg.preconditioner import Preconditioner
from ..base import BlockResult, CompressionStep
from ..latentllm.factor import Fit, Input, local
from ..latentllm.layout import Slot, dense_projections, slots
from ..result import Projection, put_attention, put_projection
from ..work import Work, multiplying
from .layers import by_input, fit_layers
from .svd_family import SVDLLM


@dataclass(frozen=True)
class AASVD(SVDLLM):
    """Layer after layer: what a low rank makes of the inputs as they are now,
    nearest to what the dense layer makes of its own.

    The least ``E |W t - W' x|^2`` of rank R, ``t`` the input of a layer in the dense model and ``x`` what the
    compressed layers before it send: the SVD, in the metric of ``x``, of the best map of any rank. Where a layer has a
    bias, it takes the means. Left out: training of every block on its output afterwards, as in the paper's numbers.
    """

    name: ClassVar[str] = "aa-svd"
    modes: ClassVar[tuple[str, ...]] = ("sequential",)
    workspace: ClassVar[tuple[float, float]] = (3.0, 4.0)  # a damped moment, its factor, and what was shifted
    holds_dense: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.precondition != "rootcov" or self.joint != "none":
            raise OptionError(
                f"method {self.name} fits each layer by itself in the metric of its inputs, got precondition="
                f"{self.precondition} and joint={self.joint}; leave them at rootcov and none, or take method svd-llm"
            )

    def statistics(self, view: BlockView) -> set[str]:
        inputs = super().statistics(view)
        return inputs | {f"dense_{name}" for name in inputs}

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        block, found = _Block(self, view, ranks), []
        for statistic, some in by_input(ranks).items():
            fit = partial(block.fit, ranks=some, statistic=statistic)
            found.append(CompressionStep({statistic, f"dense_{statistic}"}, fit))
        return found

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        found = super().work(view, ranks)
        for slot, _ in self._lower(view, ranks):
            found += Work({("solve", slot.wide): slot.out / slot.wide}) + multiplying(slot.out, slot.wide, slot.wide)
        return found

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        raise NotImplementedError("this method has stages")


class _Block:
    """A block that is compressed layer after layer: what it was, and what has become of it."""

    def __init__(self, method: AASVD, view: BlockView, ranks: dict[str, int]):
        self.method = method
        self.layout: dict[str, Slot] = slots(method, view)
        self.dense = dense_projections(method, view)
        self.attention: AttentionView = view.attention
        self.latent_cache = method.cached_latents(view, ranks)
        self.paths: dict[str, str] = view.mlp.paths if view.mlp else {}
        self.now: dict[str, Projection] = {m: dense for m, dense in self.dense.items() if m not in self.paths}

    def fit(self, _: BlockView, moments: BlockMoments, __, *, ranks: dict[str, int], statistic: str) -> BlockResult:
        """Compress the layers that have one input."""
        missing, result = moments[f"dense_{statistic}"], BlockResult()

        def fit(slot: Slot, dense: Dense, given: Input, rank: int) -> Fit:
            return local(slot, anchored(dense, given, missing), given, rank)

        latents = fit_layers(result, self.method, self.layout, self.dense, moments, ranks, statistic, fit)
        for module in [module for module in latents if module in self.paths]:
            put_projection(result, self.paths[module], latents[module])
        if latents.keys() - self.paths.keys():
            self.now |= latents
            width = self.attention.head_dim
            put_attention(result, self.attention, self.now, width, width, None, self.latent_cache)
        return result


def anchored(dense: Dense, given: Input, missing: CrossMoment) -> Dense:
    """Return the layer that makes of its inputs ``x`` what comes nearest to ``W t + b``.

    ``t`` are these inputs in the dense model.

    Args:
        given: the moment of ``x``, about its mean where the bias takes that.
        missing: ``(t - x) x^T``.

    Returns:
        Weights in fp64.
    """
    W = dense.weight.to(given.C)
    if not given.centred:
        return Dense(W + _shift(W, missing.second.to(W), given.precond), dense.bias)
    gap = (missing.second / missing.count).addr_(missing.mean, given.mean, alpha=-1)
    gap *= given.C.diagonal() > 0  # of an input that never varies rounding would be left
    shift = _shift(W, gap, given.precond)
    bias = W.new_zeros(len(W)) if dense.bias is None else dense.bias.to(W)
    return Dense(W + shift, bias + W @ missing.mean - shift @ given.mean)


def _shift(W: Tensor, gap: Tensor, precond: Preconditioner) -> Tensor:
    """``W E[(t - x) x^T] (C + lambda)^-1``: nothing where both models send the same, whatever the damping."""
    return precond.solve(W @ gap) / precond.scale**2
