"""Count the operations of a compression's passes through one block, from its shapes.

    a pass:      the products of weights and tokens, of queries and keys, of attention and values
    a moment:    the products of activations that its statistic sums

Shape legend: D model width, H query heads, N head dimension, F hidden width of the MLP, T tokens of a sample.
"""

from collections import Counter
from collections.abc import Iterable

from ..allocation import block_weights
from ..architectures import BlockView
from ..calibration.experts import INPUT
from ..calibration.statistics import STATISTICS, Place, last_place
from ..methods import Method
from ..methods.base import spared_passes

Operations = Counter[str]  # rate of a card (:class:`.cards.Card`) -> operations a token

_OF_HEADS = ("query", "key", "key_spread", "value", "query_squares", "key_squares")


def forward(view: BlockView, length: int, until: Place = "end") -> Operations:
    """Count a forward through a block up to a place.

    Args:
        until: one of :data:`rankfold.calibration.statistics.PLACES`.
    """
    attention, width = view.attention, view.width
    sent = attention.heads * attention.head_dim
    experts, mlp = view.experts, view.mlp
    passive = (experts.count - experts.active) * experts.parameters_at(experts.hidden) if experts else 0
    down = width * ((mlp.hidden if mlp else 0) + (experts.active * experts.hidden if experts else 0))
    total = block_weights(view.module) - passive
    after = 2 * down + down  # up, gate and down: what follows the attention
    projections = total - after - sent * width
    weights = {"projections": projections, "attention": projections, "mlp": total - down, "end": total}[until]
    attending = 0 if until == "projections" else 4 * sent * length / 2  # half: no token sees those after it
    return Counter({"bf16": 2 * max(0, weights) + attending})


def passes(view: BlockView, steps: Iterable[set[str]], length: int, *, step: bool) -> Operations:
    """Count what measuring the statistics of some steps takes.

    Args:
        step: in one pass that goes through the whole block; otherwise each up to where all of its statistics are seen.
    """
    found: Operations = Counter()
    for statistics in steps:
        found += forward(view, length, "end" if step else last_place(statistics))
        found += moments(view, statistics)
    return found


def moments(view: BlockView, statistics: set[str]) -> Operations:
    """Count the products of the second moments of a block."""
    attention, width = view.attention, view.width
    hidden, sent = (view.mlp.hidden if view.mlp else 0), attention.heads * attention.head_dim
    experts = view.experts
    found: Operations = Counter()
    for name in statistics:
        if not STATISTICS[name].observer or not STATISTICS[name].seen_in(view):
            continue
        if name in ("attention_input", "mlp_input", "attention_output", "mlp_hidden"):
            side = {"mlp_hidden": hidden, "attention_output": sent}.get(name, width)
            found["gram"] += side * side  # half of a product: the upper triangle
        elif name.startswith("stream_"):
            found["fp32"] += width * width
        elif name in ("mlp_feedback", "attention_feedback"):
            found["fp32"] += 2 * width * (hidden if name == "mlp_feedback" else sent)
        elif STATISTICS[name].dense_input:
            side = {"dense_mlp_hidden": hidden, "dense_attention_output": sent}.get(name, width)
            found["fp32"] += 2 * side * side
        elif name in _OF_HEADS or name == "query_key":
            found["fp32"] += 2 * attention.heads * attention.head_dim**2
        elif name == INPUT:
            found["gram"] += experts.active * experts.hidden**2
    return found


def compression(view: BlockView, method: Method, ranks: dict[str, int], length: int, mode: str) -> Operations:
    """Count all passes of compressing a block: measured once for every step, and followed as it has become; hidden
    states are on the device."""
    stages = method.stages(view, ranks)
    steps = [stage.statistics for stage in stages]
    if mode != "sequential":
        return passes(view, steps, length, step=True)
    found = passes(view, steps, length, step=False) + forward(view, length)
    spared = forward(view, length, "attention")
    found.subtract({kind: spared_passes(stages) * count for kind, count in spared.items()})
    beside = any(STATISTICS[name].two_streams for statistics in steps for name in statistics)
    return found + (forward(view, length) if beside else Counter())
