"""One block while its stages run: the coordinates found so far, and the block written in these.

Shape legend: D width of the dense stream, r of the sliced one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...._utils.present import present
from ....architectures import BlockView
from ...base import BlockResult
from ...result import put_attention, put_projection
from .converted import Converted


@dataclass(frozen=True)
class Bases:
    """Coordinates of the stream before a block, between its halves, and after it.

    Each is ``(D, r)`` orthonormal, fp64, or ``None`` where it is not sliced (yet).
    """

    before: Tensor
    inside: Tensor | None = None
    behind: Tensor | None = None


def put_block(converted: Converted, view: BlockView, bases: Bases, *, enters: bool, leaves: bool) -> BlockResult:
    """The block in these coordinates, with shortcuts ``Q^T Q'`` from each to the next.

    Args:
        view: the block with its norms, or what an earlier stage made of it.
        enters, leaves: whether it takes the stream from the model's own coordinates, and takes it back.
    """
    result, parallel = BlockResult(), view.middle is None
    inside = bases.behind if parallel else bases.inside
    parts = {name: converted.reader(name, bases.before) for name in "qkv"} | {"o": converted.writer("o", inside)}
    mlp, down = view.mlp.spec, view.mlp.spec.down
    result.modules[""] = _describe(converted, view, bases, enters=enters, leaves=leaves)
    widths = converted.qk_dim, converted.vo_dim
    put_attention(result, converted.attention, parts, *widths, converted.pairs, norms=converted.head_norms)
    for path in (mlp.gate, mlp.up):
        if path:
            put_projection(result, path, converted.reader(path, bases.before if parallel else inside))
    put_projection(result, down, converted.writer(down, bases.behind))
    shortcuts = {"shortcut": _shortcut(bases.before, inside)}
    if not parallel:
        shortcuts["mlp_shortcut"] = _shortcut(inside, bases.behind, bases.before)
    if enters:
        shortcuts["enter"] = converted.entry(bases.before)
    if leaves:
        shortcuts["leave"] = present(bases.behind)
    dtype = parts["o"].weight.dtype
    result.state.update({f"{name}.weight": matrix.to(dtype).contiguous() for name, matrix in shortcuts.items()})
    return result


def _shortcut(source: Tensor | None, target: Tensor | None, like: Tensor | None = None) -> Tensor:
    """From coordinates to coordinates, ``(out, in)``; ``None`` are the model's own."""
    if source is None and target is None:
        like = present(like)
        return torch.eye(len(like), dtype=like.dtype, device=like.device)
    if source is None:
        return present(target).T
    return source if target is None else target.T @ source


def _describe(converted: Converted, view: BlockView, bases: Bases, *, enters: bool, leaves: bool) -> dict:
    spec, width, parallel = view.mlp.spec, len(bases.before), view.middle is None

    def wide(basis: Tensor | None) -> int:
        return width if basis is None else basis.shape[1]

    return {
        "kind": "shortcut_block",
        "width": width,
        "before": wide(bases.before),
        **({} if parallel else {"inside": wide(bases.inside)}),
        "behind": wide(bases.behind),
        "enters": enters,
        "leaves": leaves,
        "eps": [norm.eps for norm in converted.norms],
        "attention": view.architecture.attention.path,
        "gate": spec.gate,
        "up": spec.up,
        "down": spec.down,
        "activation": spec.activation,
        "fused_gate": spec.fused_gate,
        "returns_tuple": view.architecture.returns_tuple,
    }
