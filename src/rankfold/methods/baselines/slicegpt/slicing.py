"""The stages in which the stream of one block is sliced, and what can be sliced at all.

Shape legend: D width of the dense stream, r of the sliced one.
"""

from typing import Any

from ...._utils.present import present
from ....architectures import Architecture, BlockView
from ....errors import UnsupportedModelError, option
from ....linalg.principal import principal_directions, projection_error
from ...base import BlockResult, CompressionStep, Method
from ...work import Work, multiplying
from .block import Bases, put_block
from .converted import Converted

STREAM = "stream"  # the module whose rank is the width of the residual stream


def check_architecture(method: Method, architecture: Architecture, view: BlockView) -> None:
    """Raise :class:`UnsupportedModelError` where rotations do not pass the norms, or weights are not taken."""
    reason = None
    if view.experts or architecture.mlp is None:
        reason = "its MLP is a mixture of experts, whose stacked weights are not taken"
    elif architecture.attention.unsupported_reason:
        reason = architecture.attention.unsupported_reason
    elif architecture.norms is None or architecture.mlp.activation is None:
        reason = "its spec does not say how its norms work and what its activation is"
    elif not view.is_plain_residual:
        reason = "a norm or a factor follows its attention and MLP, or is in its stream, and rotations do not pass it"
    if reason:
        raise UnsupportedModelError(
            f"{method.name} cannot take this {architecture.model_type}: {reason}; use another method, such as "
            f"{option('method', 'rankfold')}"
        )


def stream_statistics(view: BlockView) -> set[str]:
    """What the stages of all blocks together read."""
    return {"stream_input", "stream_output"} | (set() if view.middle is None else {"stream_middle"})


def slicing_stages(view: BlockView, rank: int) -> list[CompressionStep]:
    """Directions before the first block; between attention and MLP, on the sliced input; after the MLP, on that.

    Args:
        view: the dense block, before which the stream is in the coordinates ``view.basis``.
        rank: r; D leaves the block as it is.
    """
    if rank == view.width:
        report = {STREAM: {"rank": rank, "of": rank, "relative_error": 0.0}}
        return [CompressionStep({"stream_input"}, lambda *_: BlockResult(reports=report))]
    slicing = SlicedBlock(view, rank)
    found = [CompressionStep({"stream_input"}, slicing.enter)] if slicing.first else []
    if view.middle is not None:
        found.append(CompressionStep({"stream_middle"}, slicing.turn))
    return [*found, CompressionStep({"stream_output"}, slicing.finish)]


def slicing_work(view: BlockView, rank: int) -> Work:
    """Count the directions of every cut, and the weights of the block turned into them."""
    width = view.width
    if rank == width:
        return Work()
    cuts = 1 + (view.middle is not None)
    found = Work({("eigh", width): float(cuts)})
    for _ in range(2 * cuts):
        found += multiplying(width, width, rank)
    return found + multiplying(sum(p.numel() for p in view.module.parameters()) // width, width, rank)


class SlicedBlock:
    """One block, and the coordinates its stages have found so far."""

    def __init__(self, view: BlockView, rank: int):
        self.attention, self.rank, self.first = view.attention, rank, view.basis is None
        self.last = view.index == view.config.num_hidden_layers - 1
        self.report: dict[str, Any] = {"rank": rank, "of": view.width}
        self.converted: Converted | Any = None  # of the block with its norms, which only the first stage sees
        self.bases: Bases | Any = None

    def enter(self, view: BlockView, moments, _) -> BlockResult:
        """Slice what reaches the first block."""
        found = principal_directions(moments["stream_input"].second_moment(), self.rank)
        self.converted, self.bases = Converted.of(view, self.attention), Bases(found.directions)
        return self._put(view, "input_error", found.relative_error)

    def turn(self, view: BlockView, moments, _) -> BlockResult:
        """Slice the stream between attention and MLP."""
        self._begin(view)
        found = principal_directions(moments["stream_middle"].second_moment(), self.rank)
        self.bases = Bases(self.bases.before, found.directions)
        return self._put(view, "middle_error", found.relative_error)

    def finish(self, view: BlockView, moments, _) -> BlockResult:
        """Slice what the block sends."""
        self._begin(view)
        found = principal_directions(moments["stream_output"].second_moment(), self.rank)
        Q = found.directions
        bases = Bases(self.bases.before, self.bases.inside, Q)
        result = put_block(self.converted, view, bases, enters=self.first, leaves=self.last)
        result.reports[STREAM] = {**self.report, "relative_error": found.relative_error}
        result.errors[STREAM] = lambda other: projection_error(other["stream_output"].second_moment(), Q)
        result.basis = None if self.last else Q
        return result

    def _begin(self, view: BlockView) -> None:
        if self.converted is None:
            self.converted, self.bases = Converted.of(view, self.attention), Bases(present(view.basis).to(view.device))

    def _put(self, view: BlockView, key: str, error: float) -> BlockResult:
        """The block so far, its input and output in the model's own coordinates, to be measured."""
        result = put_block(self.converted, view, self.bases, enters=True, leaves=False)
        self.report[key] = error
        result.reports[STREAM] = {**self.report, "relative_error": error}
        return result
