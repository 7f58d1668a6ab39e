"""Principal directions of a second moment.

Shape legend: D width of the moment, r directions kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .lowrank import fix_signs
from .psd import check_moment


class Principal(NamedTuple):
    """Result of :func:`principal_directions`."""

    directions: Tensor  # (D, r) orthonormal, the largest first; the largest entry of each is positive
    relative_error: float  # in [0, 1], RMS of what is lost over the RMS of all


@torch.no_grad()
def principal_directions(C: Tensor, rank: int) -> Principal:
    r"""``Q`` that minimises :math:`E\|x - Q Q^\top x\|^2` under :math:`Q^\top Q = I`: the leading eigenvectors of
    ``C``.

    No mean is subtracted: where it is large, it is a direction that counts.

    Args:
        C: ``(D, D)`` second moment, fp32 or fp64, any positive scale.
        rank: r, in [1, D].

    Raises:
        ValueError: ``C`` is not square or not finite, or the rank is out of range.

    Cost: O(D^3).
    """
    D = C.shape[-1]
    check_moment(C, D)
    if not 1 <= rank <= D:
        raise ValueError(f"rank must be in [1, {D}], got {rank}")
    Q = torch.linalg.eigh(C).eigenvectors.flip(-1)[:, :rank]
    Q = fix_signs(Q).contiguous()
    return Principal(Q, projection_error(C, Q))


def projection_error(C: Tensor, Q: Tensor) -> float:
    r"""RMS of :math:`x - Q Q^\top x` over the RMS of ``x``, in [0, 1].

    Args:
        C: ``(D, D)`` second moment of ``x``.
        Q: ``(D, r)`` orthonormal.
    """
    total = C.diagonal().sum()
    kept = ((C @ Q) * Q).sum()
    return (((total - kept) / total).clamp(0, 1).sqrt()).item() if total > 0 else 0.0
