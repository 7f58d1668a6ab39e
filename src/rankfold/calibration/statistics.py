"""What can be measured in a block, in one table: a new statistic is one row, with an existing observer or a new one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn

from ..architectures import BlockView
from .experts import INPUT, ROUTING, ExpertInputs, RouterWeights
from .heads import HeadObserver, Heads, ProductObserver, Projections
from .moments import head_grams
from .observers import DenseInputObserver, EnergyObserver, InputObserver, Observer, SamplesObserver
from .residual import ChangeObserver, FeedbackObserver, InfluenceObserver, StreamObserver

SAMPLE_ROWS = 8  # rows of `mlp_samples` kept for every hidden unit; fits on fewer remember them (docs/papers.md)


@dataclass(frozen=True)
class Scene:
    """What observers of one block are made from."""

    view: BlockView
    tokens: int  # that will go through the block, in all processes
    first: int  # of these that its observers see
    absolute: bool
    windows: bool
    norms_after: bool
    projections: Projections

    def layer(self, path: str) -> nn.Module:
        return self.view.module.get_submodule(path)

    def input_of(self, module: nn.Module) -> Observer:
        norm = self.view.norm_after(module) if self.norms_after else None
        return InputObserver(module, absolute=self.absolute, windows=self.windows, norm=norm)

    def dense_input(self, name: str) -> Observer:
        """Of an input, with what it lacks of the one in the dense model."""
        return DenseInputObserver(self.layer(self.view.readers[name][0]), name)

    def head(self, name: str) -> Observer:
        """Of queries, keys, centred keys or values."""
        return HeadObserver(self.projections, lambda heads: (getattr(heads, name), heads.grams(name)))

    def squares(self, index: int) -> Observer:
        """Of squares over the mean square that the norm of queries (0) or keys (1) divides by."""

        def look(heads: Heads) -> tuple[Tensor, Tensor]:
            features = heads.relative_squares(index)
            return features, head_grams(features)

        return HeadObserver(self.projections, look)

    def routing(self) -> Observer:
        return RouterWeights(self.view.experts, self.view.norm_after_experts if self.norms_after else None)

    def samples(self) -> Observer:
        mlp = self.view.mlp
        rows = SAMPLE_ROWS * mlp.hidden
        return SamplesObserver(self.layer(mlp.spec.up), tokens=self.tokens, rows=rows, first=self.first)


# After queries, keys and values; before the output projection of attention, or of the MLP; after the block.
Place = Literal["projections", "attention", "mlp", "end"]
PLACES: tuple[Place, ...] = get_args(Place)


class Statistic(NamedTuple):
    """Who measures it; ``None`` for a setting of others."""

    observer: Callable[[Scene], Observer] | None
    until: Place = "attention"  # where a forward has gone when all of it is seen
    two_streams: bool = False  # compares with the dense model on the same tokens
    sequential: bool = False  # of use only on what the compressed blocks send
    part: Literal["heads", "norms", "attention", "mlp", "experts", "stream"] | None = None  # which not every block has
    dense_input: str = ""  # the input it reads of the dense model

    def seen_in(self, view: BlockView) -> bool:
        """Whether a block has what is measured."""
        if self.part == "heads":
            return bool(view.attention.spec.qkv)
        if self.part == "attention":
            return view.attention.spec.is_there
        if self.part == "stream":
            return not view.architecture.is_projector
        if self.part == "norms":
            return bool(view.attention.head_norms)
        return self.part is None or getattr(view, self.part) is not None


def _beside(name: str, until: Place = "attention", *, part) -> Statistic:
    return Statistic(lambda s: s.dense_input(name), until, two_streams=True, part=part, dense_input=name)


# What can be measured in a block. Methods name the ones they need.
STATISTICS: dict[str, Statistic] = {
    # Inputs of q, k and v; of the output projection; of up and gate; of the down projection.
    "attention_input": Statistic(lambda s: s.input_of(s.view.attention.qkv_modules[0]), "projections", part="heads"),
    "attention_output": Statistic(lambda s: s.input_of(s.view.attention.output_module), part="attention"),
    "mlp_input": Statistic(lambda s: s.input_of(s.layer(s.view.mlp.spec.up)), "mlp", part="mlp"),
    "mlp_hidden": Statistic(lambda s: s.input_of(s.layer(s.view.mlp.spec.down)), "mlp", part="mlp"),
    # Rows of the input of up, for methods that iterate on activations.
    "mlp_samples": Statistic(Scene.samples, "mlp", part="mlp"),
    # What these inputs lack of those in the dense model, with them.
    "dense_attention_input": _beside("attention_input", "projections", part="heads"),
    "dense_attention_output": _beside("attention_output", part="attention"),
    "dense_mlp_input": _beside("mlp_input", "mlp", part="mlp"),
    "dense_mlp_hidden": _beside("mlp_hidden", "mlp", part="mlp"),
    # What the dense stream has after attention and this one lacks, with the input of the output projection.
    "attention_feedback": Statistic(
        lambda s: FeedbackObserver(s.view, s.view.attention.output_module, attention=True),
        two_streams=True,
        part="attention",
    ),
    # What the dense stream has after the block and this one lacks after attention, with the input of the down
    # projection.
    "mlp_feedback": Statistic(
        lambda s: FeedbackObserver(s.view, s.layer(s.view.mlp.spec.down), attention=False),
        "mlp",
        two_streams=True,
        part="mlp",
    ),
    # The tokens that experts receive, and what the output of each expert is multiplied with, of every token.
    INPUT: Statistic(lambda s: ExpertInputs(s.view.experts), "end", part="experts"),
    ROUTING: Statistic(Scene.routing, "end", part="experts"),
    # Per head: rotated queries; rotated keys, and these minus their mean over the window; values.
    "query": Statistic(lambda s: s.head("query"), "projections", part="heads"),
    "key": Statistic(lambda s: s.head("key"), "projections", part="heads"),
    "key_spread": Statistic(lambda s: s.head("key_spread"), "projections", part="heads"),
    "value": Statistic(lambda s: s.head("value"), "projections", part="heads"),
    # The exact cost of dropping dimensions of queries and keys.
    "query_key": Statistic(lambda s: ProductObserver(s.projections), "projections", part="heads"),
    # Squares of the queries (keys) that a q/k-norm receives, over the mean square it divides by, per head.
    "query_squares": Statistic(lambda s: s.squares(0), "projections", part="norms"),
    "key_squares": Statistic(lambda s: s.squares(1), "projections", part="norms"),
    # The normalised residual stream before the block, between its halves, and after it.
    "stream_input": Statistic(lambda s: StreamObserver(s.view, "input"), sequential=True),
    "stream_middle": Statistic(lambda s: StreamObserver(s.view, "middle"), "mlp", sequential=True),
    "stream_output": Statistic(lambda s: StreamObserver(s.view, "output"), "end", sequential=True),
    # Of every input above also: the mean absolute value, for the l1 pre-conditioner; the sum over every window, for
    # covariances within windows.
    "absolute": Statistic(None),
    "windows": Statistic(None),
    # Inputs of output and down projections over the RMS of what these make of them, where a norm stands after them;
    # and likewise what outputs of experts are multiplied with.
    "norms_after": Statistic(None, sequential=True),
    # Squares of what q, k and v, the output projection, up and gate, and the down projection receive, one after the
    # other.
    "input_energy": Statistic(
        lambda s: EnergyObserver([s.layer(paths[0]) for paths in s.view.readers.values()]), "mlp"
    ),
    "influence": Statistic(lambda s: InfluenceObserver(s.view), "end", part="stream"),
    "change": Statistic(lambda _: ChangeObserver(), "end", part="stream"),
}


def last_place(statistics: Iterable[str]) -> Place:
    """Return how far a forward has to go for some statistics; settings of others do not count."""
    places: set[Place] = {STATISTICS[name].until for name in statistics if STATISTICS[name].observer}
    return max(places, key=PLACES.index) if places else "end"


# What a store of moments holds.
STORED = frozenset(name for name, row in STATISTICS.items() if not row.two_streams and not row.sequential)


def dense_inputs(statistics: Iterable[str]) -> set[str]:
    """Return the inputs that some statistics read of the dense model."""
    return {STATISTICS[name].dense_input for name in statistics} - {""}


def observers_for(view: BlockView, statistics: set[str], tokens: int, first: int = 0) -> dict[str, Observer]:
    """Return name -> observer of a block for the statistics wanted.

    Args:
        tokens: that will go through the block, in all processes together.
        first: number of the first of them that these observers see.
    """
    absolute, windows, norms = (name in statistics for name in ("absolute", "windows", "norms_after"))
    scene = Scene(view, tokens, first, absolute, windows, norms, Projections(view.attention))
    rows = {name: row for name, row in STATISTICS.items() if name in statistics and row.seen_in(view)}
    return {name: row.observer(scene) for name, row in rows.items() if row.observer}
