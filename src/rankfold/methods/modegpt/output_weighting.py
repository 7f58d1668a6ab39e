"""What errors at the output of a module do to the loss: ``output_weighting=fisher``.

Shape legend: D width of the output, N width of the input.

With ``g`` the gradient of the loss at the output and ``G = E[g g^T]``, an error ``e = (W - W') h`` changes the loss, to
second order and in the Fisher approximation, by ``E[(g^T e)^2] / 2``; where gradient and input are independent that is
``tr(G (W - W') C (W - W')^T) / 2``. ``G`` says which outputs matter, as ``C`` says which inputs occur.
"""

from torch import Tensor

from ...calibration.moments import BlockMoments, Moment
from ...linalg.psd import metric_root

RIDGE = 0.1  # of the mean diagonal of G: it is measured on little text


def output_root(moments: BlockMoments, name: str) -> Tensor | None:
    """``(D, D)`` root ``R`` with ``R^T R = G + lambda I``; ``None`` where no gradient was asked for."""
    return metric_root(moments[name].second_moment(), ridge=RIDGE) if name in moments else None


def weighted(root: Tensor | None, W: Tensor) -> Tensor:
    """``R W``, or ``W`` where all outputs count alike."""
    return W if root is None else root.to(W) @ W


def predicted_loss(gradient: Moment, gap: Tensor, C: Tensor) -> float:
    """Predict the nats per token that an error ``gap`` ``(D, N)`` costs on inputs with moment ``C`` ``(N, N)``."""
    G, C = gradient.second_moment().to(gap), C.to(gap)
    return ((G @ gap) * (gap @ C)).sum().clamp_min(0).item() / 2
