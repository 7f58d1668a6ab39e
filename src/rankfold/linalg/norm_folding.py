r"""A block with LayerNorms as one with plain RMSNorms: all that is linear in a norm moves into its neighbours.

Shape legend: D model width, O rows of a projection that reads the stream, F inputs of one that writes it.

``LayerNorm(x) = scale * N(M x) + shift`` with :math:`M = I - \mathbf{1}\mathbf{1}^\top / D`, which subtracts the mean,
and ``N(x) = x / sqrt(mean(x^2) + eps)``. ``N`` commutes with every rotation of the stream, the rest does not: scale and
shift go into what reads the norm, ``M`` into everything that writes to the stream. SliceGPT (arXiv:2401.15024), Sec.
3.2.
"""

from torch import Tensor


def fold_norm(W: Tensor, b: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
    r"""The projection that reads ``n`` instead of ``scale * n + shift``: :math:`W \operatorname{diag}(s)`,
    ``b + W shift``.

    Args:
        W: ``(O, D)``.  b: ``(O,)`` or ``None``.
        scale, shift: ``(D,)``, or ``None`` for 1 and 0.

    Returns:
        Weight and bias; a bias where ``b`` or ``shift`` is there; dtypes as those of ``W``.
    """
    bias = b
    if shift is not None:
        moved = W @ shift.to(W)
        bias = moved if b is None else b.to(W) + moved
    return W if scale is None else W * scale.to(W), bias


def centre_columns(W: Tensor) -> Tensor:
    """``M W``: every column minus its mean, so that what is written has mean zero.

    Args:
        W: ``(D, F)``, a projection that writes to the stream, or ``(D,)``, its bias.
    """
    return W - W.mean(0)
