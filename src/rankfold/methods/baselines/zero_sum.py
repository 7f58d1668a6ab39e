"""ZS-SVD (arXiv:2602.02848): SVD in whitened coordinates, ranks by what each singular value does to the loss.

Shape legend: O outputs, N inputs, K = min(O, N).
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...allocation import Allocation, ZeroSum
from ...architectures import BlockView
from ...linalg.preconditioner import Preconditioner
from ..latentllm.factor import prepare
from ..latentllm.layout import INPUTS, dense_projections, stored_rows
from .svd_family import SVDLLM


@dataclass(frozen=True)
class ZSSVD(SVDLLM):
    """SVD after whitening, ranks by the zero-sum rule: ZS-SVD (arXiv:2602.02848) in one shot.

    Removing a singular value ``s`` of ``W E = U S V^T`` changes the loss by ``-s u^T G E^-T v`` to first order, ``G``
    the gradient of the weight and ``E`` the whitening of its inputs. Where a bias takes the mean ``m`` of what is lost,
    which the paper does not have, its gradient ``g`` counts: ``G - g m^T`` is in place of ``G``. Ranks are chosen on
    the dense model; the paper's factors are those of mode one-pass. Left out: corrections between stages, and quantised
    factors.
    """

    name: ClassVar[str] = "zs-svd"
    workspace: ClassVar[tuple[float, float]] = (2.0, 4.0)  # a damped moment and its factor
    allocations: ClassVar[tuple[type[Allocation], ...]] = (ZeroSum,)
    takes_experts: ClassVar[bool] = False

    allocation: Allocation = field(default=ZeroSum())

    def gradients(self, view: BlockView) -> set[str]:
        projections, found = dense_projections(self, view), set()
        for module in self.supported_modules(view.architecture, view):
            kinds = ("weight", "bias") if self.refits_bias(projections[module]) else ("weight",)
            found |= {f"{stored_rows(view, module)[0]}_{kind}_gradient" for kind in kinds}
        return found

    def shared(self, view: BlockView) -> set[str]:
        return self.statistics(view)  # of all blocks, before ranks are chosen

    def singular_value_effects(self, view: BlockView, moments) -> dict[str, list[float]]:
        """Return module -> expected change of the loss without each singular value, the largest value first."""
        projections, found = dense_projections(self, view), {}
        for module in self.supported_modules(view.architecture, view):
            dense, (layer, rows) = projections[module], stored_rows(view, module)
            gradient = moments[f"{layer}_weight_gradient"]
            given = prepare(self, moments, INPUTS[module], centred=self.refits_bias(dense))
            G = gradient.total.double()[rows] / gradient.count
            if given.centred:
                of_bias = moments[f"{layer}_bias_gradient"]
                G -= torch.outer(of_bias.total.double()[rows] / of_bias.count, given.mean.to(G))
            found[module] = loss_changes(dense.weight.double(), G, given.precond).tolist()
        return found


def loss_changes(W: Tensor, G: Tensor, precond: Preconditioner) -> Tensor:
    """Return ``(K,)`` first-order changes of a loss when a singular value of ``W E`` becomes zero, largest value first.

    Args:
        W: ``(O, N)`` weight.
        G: ``(O, N)`` gradient of the loss by it, of a bias too where that takes the mean of what is lost.
        precond: ``E``.
    """
    U, S, Vh = torch.linalg.svd(precond.apply(W), full_matrices=False)
    return -S * ((U.T @ G.to(S)) * precond.undo(Vh)).sum(1)
