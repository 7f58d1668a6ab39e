"""calibrate -> allocate -> decompose -> replace -> verify: the whole of rankfold on one page.

    model --- blocks --- token batches stream through one block at a time ---> second moments
                                                                                     |
              checkpoint <--- smaller modules <--- method: factors <--- ranks <--- allocation

Every step that knows a model family, a method or a file format lives elsewhere.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from .calibration.runner import STATISTICS, advance, measure, start
from .calibration.store import MomentStore
from .calibration.tokens import Tokens, check_vocabulary
from .checkpoint.load import assemble
from .checkpoint.run import Run, compressed_config, stored
from .checkpoint.source import Source
from .errors import NumericsError, OptionError
from .files import check_output
from .methods import BlockResult, Method
from .modules import build
from .planning import allocate_ranks, build_plan
from .progress import track
from .report.card import model_card, reproduce_command
from .report.plan import Plan
from .report.record import environment, peak_memory_bytes, versions
from .version import __version__

__all__ = ["calibrate", "compress", "needed", "plan"]

log = logging.getLogger(__name__)


def calibrate(
    source: Source, tokens: Tokens, output: str | Path | None = None, *, statistics: set[str] | None = None
) -> MomentStore:
    """Measure the second moments of every block of the dense model, in one pass.

    Args:
        source: an open model.
        tokens: calibration windows.
        output: folder to keep the moments in (continued where an earlier call was interrupted); ``None``: in memory.
        statistics: names out of :data:`rankfold.calibration.runner.STATISTICS`; all by default, so that any method can be
            computed from them.

    Raises:
        NumericsError: a weight or activation is NaN or infinite.
        CheckpointError: ``output`` holds something else.
    """
    statistics = _available(source, statistics or set(STATISTICS))
    identity = _moments_identity(source, tokens, statistics)
    store = MomentStore.create(identity, Path(output) if output else None)
    if all(i in store for i in range(len(source))):
        store.finish()
        return store
    stream = _start(source, tokens)
    for index in track(range(len(source)), "calibrating"):
        view = source.block(index)
        if index in store:
            advance(view, stream)
        else:
            store[index] = measure(view, stream, statistics, step=True)
    store.finish()
    return store


def plan(source: Source, method: Method, moments: MomentStore | None = None) -> Plan:
    """What :func:`compress` would do: ranks, counts, cache, memory, and with moments the error of every module.

    Args:
        source: an open model.
        method: what to do.
        moments: of the dense model; needed by the influence allocations and for predicted errors.
    """
    scores = _scores(moments, len(source)) if method.allocation != "uniform" else None
    ranks, facts = allocate_ranks(source, method, scores)
    errors = {}
    if moments is not None:
        moments.check(source, _statistics(source, method))
        for index in track(range(len(source)), "predicting"):
            result = _decompose(method, source.block(index), moments[index], _of_block(ranks, index))
            errors |= {(index, module): report["relative_error"] for module, report in result.reports.items()}
    return build_plan(source, method, ranks, facts, errors, moments.identity["tokens"] if moments else None)


def compress(
    source: Source,
    method: Method,
    tokens: Tokens | None = None,
    output: str | Path | None = None,
    *,
    moments: MomentStore | None = None,
    mode: str = "sequential",
    on_plan: Callable[[Plan], None] | None = None,
) -> nn.Module | Path:
    """Compress a model.

    Args:
        source: an open model; it is not changed.
        method: what to do, e.g. ``MoDeGPT(sparsity=0.3)``.
        tokens: calibration windows; not needed with ``moments``.
        output: folder to write, block by block (resumable); ``None`` returns the model in memory.
        moments: of the dense model, from :func:`calibrate`; implies ``mode="one-pass"``.
        mode: ``sequential``: every block is measured on what the compressed blocks before it produce (MoDeGPT App.
            B.2). ``one-pass``: all blocks are measured on the dense model.
        on_plan: called with the plan before any block is compressed.

    Returns:
        The folder written, or the compressed model.

    Raises:
        OptionError, UnsupportedModelError, NumericsError, CheckpointError: with one line saying what to do.
    """
    if mode not in ("sequential", "one-pass"):
        raise OptionError(f"mode must be sequential or one-pass, got {mode!r}")
    if (tokens is None) == (moments is None):
        raise OptionError("give either calibration tokens or moments, not both and not neither")
    if output is not None:
        check_output(Path(output))
    mode = "one-pass" if moments is not None else mode
    started, seconds = time.perf_counter(), {}
    calibration = tokens.describe() if tokens else moments.identity["tokens"]
    identity = _run_identity(source, method, calibration, mode)
    run = Run(output, identity, len(source)) if output is not None else None

    if mode == "one-pass" and moments is None:
        folder = run.folder / "moments" if run else None
        moments = calibrate(source, tokens, folder, statistics=needed(source, method))
    if mode == "sequential" and method.allocation != "uniform":
        scores = _scores(
            calibrate(source, tokens, run.folder / "moments" if run else None, statistics={"influence"}), len(source)
        )
    else:
        scores = _scores(moments, len(source)) if method.allocation != "uniform" else None
    if moments is not None:
        moments.check(source, _statistics(source, method))
    seconds["calibrate"] = time.perf_counter() - started

    ranks, facts = allocate_ranks(source, method, scores)
    the_plan = build_plan(source, method, ranks, facts, {}, calibration)
    if on_plan:
        on_plan(the_plan)
    stream = _start(source, tokens) if mode == "sequential" else None
    statistics = _statistics(source, method)
    modules, reports, finished = {}, {}, {}
    for index in track(range(len(source)), "compressing"):
        view = source.block(index)
        if run and index in run:
            state, record = run.load_block(index, view.path)
            result = BlockResult(record["modules"], state, record["reports"])
        else:
            measured = moments[index] if stream is None else measure(view, stream, statistics, step=False)
            result = _decompose(method, view, measured, _of_block(ranks, index))
        replace(view, result, source)
        if run and index not in run:
            record = {"modules": result.modules, "reports": result.reports}
            run.save_block(index, view.path, view.module, source.dtype, record)
        if stream is not None:
            advance(view, stream)
        if run is None:
            finished |= {f"{view.path}.{name}": tensor for name, tensor in view.module.state_dict().items()}
        modules |= {f"{view.path}.{path}": spec for path, spec in result.modules.items()}
        reports |= {str(index): result.reports}
    seconds["total"] = time.perf_counter() - started

    description = {"rankfold_version": __version__, **identity, "counts": _counts(the_plan)}
    config = compressed_config(source, description, modules)
    if run is None:
        return assemble(source, config, finished)
    command = reproduce_command(source.name, run.output.name, method.describe(), calibration, mode, _dtype_name(source))
    card = model_card(the_plan, __version__, run.output.name, calibration, command)
    estimates = {"seconds": the_plan.seconds, "peak_memory_bytes": the_plan.peak_memory_bytes}
    measurements = {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes(), "estimated": estimates}
    record = {
        **description,
        "command": command,
        "versions": versions(),
        "plan": {k: v for k, v in the_plan.to_dict().items() if k not in estimates},
        "blocks": reports,
        "run": measurements
        | environment(source.device),  # the only part that differs between two runs of the same configuration
    }
    return run.finish(source, config, card, record)


def replace(view, result: BlockResult, source: Source) -> None:
    """Put the result's modules into the block, with weights rounded as they will be stored."""
    for path, spec in result.modules.items():
        parent, _, name = path.rpartition(".")
        owner = view.module.get_submodule(parent)
        with torch.device("meta"):
            module = build(spec, getattr(owner, name), view.config)
        adopted = set(spec.get("adopt", {}))
        state = {
            key.removeprefix(path + "."): _as_computed(tensor, source)
            for key, tensor in result.state.items()
            if key.startswith(path + ".") and key.removeprefix(path + ".").split(".")[0] not in adopted
        }
        missing = module.load_state_dict(state, strict=False, assign=True).missing_keys
        if any(key.split(".")[0] not in adopted for key in missing):
            raise NumericsError(f"{view.path}.{path} was not computed completely: {', '.join(missing)} missing")
        setattr(owner, name, module.to(source.device).eval())


def _as_computed(tensor, source: Source):
    if not tensor.is_floating_point():
        return tensor.to(source.device)
    if not torch.isfinite(tensor).all():
        raise NumericsError("a factor has NaN or infinite entries; raise the ridge or use more calibration tokens")
    return stored(tensor, source.dtype).to(source.device, source.compute_dtype)


def _decompose(method: Method, view, moments, ranks: dict[str, int]) -> BlockResult:
    if view.device.type == "mps":  # no fp64 there; the factors go back to the device when they are installed
        view = view.on_cpu()
    try:
        return method.decompose(view, moments, ranks)
    except (torch.linalg.LinAlgError, ValueError) as error:
        raise NumericsError(f"{view.path}: {error}") from error


def _start(source: Source, tokens: Tokens):
    check_vocabulary(tokens.ids, source.config.vocab_size)
    return start(source, tokens.ids, autocast=source.autocast)


def _available(source: Source, statistics: set[str]) -> set[str]:
    """Without the statistics of an MLP that the architecture does not show."""
    hidden = {"mlp_input", "mlp_hidden", "mlp_samples"} if source.architecture.mlp is None else set()
    return statistics - hidden


def needed(source: Source, method: Method) -> set[str]:
    """Statistics that planning and decomposing with this method read."""
    return _statistics(source, method) | ({"influence"} if method.allocation != "uniform" else set())


def _statistics(source: Source, method: Method) -> set[str]:
    return method.statistics(source.meta_block(0))


def _scores(moments: MomentStore | None, blocks: int) -> dict[int, tuple[float, ...]]:
    """Block -> influence of the block, its attention, its MLP."""
    if moments is None or "influence" not in moments.identity["statistics"]:
        raise OptionError("an influence allocation needs moments with influence scores; run `rankfold calibrate`")
    return {i: tuple(moments[i]["influence"].mean.tolist()) for i in range(blocks)}


def _of_block(ranks: dict[tuple[int, str], int], index: int) -> dict[str, int]:
    return {module: rank for (block, module), rank in ranks.items() if block == index}


def _moments_identity(source: Source, tokens: Tokens, statistics: set[str]) -> dict:
    return {
        "name": source.name,
        "model": source.fingerprint,
        "blocks": len(source),
        "dtype": _dtype_name(source),
        "autocast": str(source.autocast).removeprefix("torch.") if source.autocast else None,
        "tokens": tokens.describe(),
        "statistics": sorted(statistics),
    }


def _run_identity(source: Source, method: Method, calibration: dict, mode: str) -> dict:
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in method.describe().items()}
    return {
        "method": options.pop("method"),
        "options": options,
        "mode": mode,
        "base_model": source.name,
        "fingerprint": source.fingerprint,
        "dtype": _dtype_name(source),
        "autocast": str(source.autocast).removeprefix("torch.") if source.autocast else None,
        "calibration": calibration,
    }


def _dtype_name(source: Source) -> str:
    return str(source.dtype).removeprefix("torch.")


def _counts(the_plan: Plan) -> dict:
    return {
        "sparsity": the_plan.sparsity,
        "counted_weights": the_plan.counted_weights,
        "removed_weights": the_plan.removed_weights,
        "parameters": the_plan.parameters_after,
        "bytes": the_plan.bytes_after,
        "kv_bytes_per_token": the_plan.kv_bytes_per_token_after,
    }
