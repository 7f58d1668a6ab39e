"""A plan of a model that is only a config, on accelerators that are not here.

Ranks are those of a uniform allocation where the method's own goes by numbers. Sizes are exact. Memory is the estimate
of :mod:`.plan`. Time is that of :mod:`.duration`, with operations counted from shapes (:mod:`.passes`) and the rates of
a card (:mod:`.cards`) in place of what is measured.

Several accelerators share the calibration samples, and the curves and trials of a measured allocation; reading and
decompositions are not shared.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, cast

from ..allocation import Measured, Uniform
from ..architectures import BlockView
from ..calibration.offload import Offload
from ..data.calibration_data import mean_length
from ..errors import OptionError, UnsupportedModelError, method_option, option
from ..methods import MeasurableMethod, Method, make_method
from ..models.outline import Outline
from ..report.plan import Plan
from .budget import RankOptions, rank_options
from .cards import Card
from .duration import Machine, Rates, timed
from .importance import of_dense
from .passes import Operations, compression, forward, passes
from .plan import Allocated, allocate_ranks, build_plan, peak_memory, with_ranks


def predict(source: Outline, method: Method, calibration: dict[str, Any], card: Card, count: int) -> Plan:
    """Return the plan of a compression on some accelerators.

    Args:
        calibration: ``num_samples``, ``max_length``, ``tokens`` and ``held_out`` of the samples that there will be.
        card: of each accelerator.
        count: of accelerators, at least 1.

    Raises:
        OptionError: ``count`` is out of range, or the method cannot be planned without numbers.
    """
    if count < 1 or count > calibration["num_samples"]:
        raise OptionError(
            f"{option('gpus')} must be in [1, {calibration['num_samples']}], a calibration sample for each, got {count}"
        )
    if method.budget.is_timed:
        raise OptionError(
            "a budget in time is measured on weights, which a config does not have; choose another budget"
        )
    source.memory_bytes = card.bytes
    options = rank_options(source, method)
    options.check(method)
    allocated, own = _allocated(source, options, method)
    mine = _shared_out(calibration, count)
    the_plan = build_plan(source, method, allocated, {}, mine)
    machine = Machine(lambda *given: rates_on(card, count, *given), card.seconds_for, count)
    seconds = timed(the_plan, source, calibration, method.modes[0], machine).seconds
    hardware = {
        "gpu": card.name,
        "gpus": count,
        "memory_bytes": card.bytes,
        "num_samples": calibration["num_samples"],
        "max_length": calibration["max_length"],
        "rates_are_measured": card.is_measured,
        "allocation": method.allocation.name if own else Uniform.name,
        "advice": _advice(source, method, calibration, card, count, the_plan.peak_memory_bytes),
    }
    return replace(the_plan, seconds=seconds, calibration=None, hardware=hardware)


class _NumbersMissing(Exception):
    """An allocation asked for what a config does not have."""


class _NoNumbers:
    """What an allocation may ask about a dense model of which only the shapes are there."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _NumbersMissing


def _allocated(source: Outline, options: RankOptions, method: Method) -> tuple[Allocated, bool]:
    """Choose ranks, and tell whether the method's own allocation did."""
    try:
        return allocate_ranks(options, method, method.allocation.measure(cast(Any, _NoNumbers()))), True
    except _NumbersMissing:
        pass
    if not issubclass(Uniform, method.allocations):
        raise OptionError(
            f"method {method.name} chooses what to remove by numbers of the model, which a config does not have; give "
            f"the model without {option('gpu')}, or another {option('method')}"
        )
    uniform = replace(method, allocation=Uniform())  # which may have other ranks
    return allocate_ranks(rank_options(source, uniform), uniform), False


def _shared_out(calibration: dict[str, Any], count: int) -> dict[str, Any]:
    """Describe the samples of one of ``count`` accelerators."""

    def share(samples: int) -> int:
        return -(-samples // count)

    samples, length = share(calibration["num_samples"]), mean_length(calibration)
    return calibration | {
        "num_samples": samples,
        "tokens": int(samples * length),
        "tokens_of_all": calibration["tokens"],
        "held_out": share(calibration.get("held_out", 0)),
    }


def rates_on(card: Card, count: int, source: Outline, method: Method, the_plan: Plan, mode: str, length: int) -> Rates:
    """Return the rates of a block in the middle, as :mod:`.duration` measures them; arguments as there."""
    index = len(source) // 2
    view = source.meta_block(index)
    item = source.dtype.itemsize
    tensors = [*view.module.parameters(), *view.module.buffers()]
    head = sum(p.numel() for p in _head(source))

    def seconds(operations: Operations) -> float:
        return sum(card.seconds(kind, amount) for kind, amount in operations.items()) / count

    wanted = of_dense(source, method) if mode == "sequential" else set[str]()
    return Rates(
        read=sum(t.numel() for t in tensors) * item / (card.read * 1e9),
        forward=seconds(forward(view, length)),
        stages=seconds(compression(view, method, the_plan.ranks(index), length, mode)),
        dense=seconds(passes(view, [wanted], length, step=True)) if wanted else 0.0,
        alone=seconds(_alone(view, method, length)),
        head=card.seconds("bf16", 2 * head) / count,
    )


def _alone(view: BlockView, method: Method, length: int) -> Operations:
    if not (isinstance(method, MeasurableMethod) and isinstance(method.allocation, Measured)):
        return Operations()
    return passes(view, [method.alone(view).statistics(view)], length, step=True)


def _head(source: Outline):
    head = source.model.get_output_embeddings()
    return [] if head is None else head.parameters()


def _advice(
    source: Outline,
    method: Method,
    calibration: dict[str, Any],
    card: Card,
    count: int,
    peak: int,
) -> str | None:
    """Say what does not fit and what to do; ``None`` where all fits."""
    if peak <= card.bytes:
        return None

    mine = _shared_out(calibration, count)

    def fits(method: Method, is_offloaded: bool) -> bool:
        offload = Offload(source.device) if is_offloaded else source.offload
        allocated, _ = _allocated(source, rank_options(source, method), method)
        return peak_memory(source, method, mine, offload, with_ranks(source, allocated.ranks)) <= card.bytes

    return f"{peak / 1e9:.0f} GB do not fit on {card.gigabytes:g} GB: {_remedy(fits, method)}"


def _remedy(fits: Callable[[Method, bool], bool], method: Method) -> str:
    host = option("offload", "cpu")
    if fits(method, True):
        return f"keep hidden states in host memory ({host}), or take fewer or shorter samples, or more accelerators"
    if method.name != "modegpt":
        try:
            lean = make_method("modegpt", sparsity=method.sparsity)
            modegpt = f"take {option('method', 'modegpt')}, which keeps fewer matrices of the MLP's width"
            if fits(lean, False):
                return modegpt
            if fits(lean, True):
                return f"{modegpt}, and keep hidden states in host memory ({host})"
        except (OptionError, UnsupportedModelError):
            pass
    attention = method_option("modules", ("qk", "vo"))
    return f"compress on the CPU ({option('device', 'cpu')}), in host memory, or leave the MLP dense ({attention})"
