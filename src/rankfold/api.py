"""The public functions: an argument of a wrong type is refused in one line before anything runs.

Each opens what it is given, and hands it to the pipeline.
"""

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from . import exports, pipeline
from ._utils.arguments import typed
from ._utils.present import present
from .calibration.offload import Offload
from .calibration.store import MomentStore
from .checkpoint.load import load_model
from .checkpoint.saving import save_model
from .checkpoint.streamed import open_streamed
from .components import compress_components
from .compression.cards import find_card
from .compression.prediction import predict
from .compression.result import CompressionResult
from .compression.validate_spec import validated
from .data.built_in import DEFAULT_TEXT
from .data.calibration_data import CalibrationData
from .data.load import load_calibration
from .data.mixing import planned_samples
from .errors import OptionError, check_choice, option
from .evaluation import perplexity as evaluation
from .evaluation.evaluate import evaluate_text
from .exports import Exported, RoundingText
from .methods import Method, make_method, method_class
from .models.dense_model import DenseModel
from .models.devices import resolve_dtype
from .models.opening import open_model
from .models.outline import open_outline
from .quality import compress_to_keep, method_to_keep
from .report.goal import Goal, goal_of
from .report.plan import Plan
from .target_size import method_of_size

__all__ = [
    "calibrate",
    "compress",
    "compress_components",
    "evaluate_text",
    "export",
    "load",
    "load_calibration",
    "make_method",
    "open_model",
    "perplexity",
    "plan",
    "push",
    "save",
]

AnyModel = str | Path | nn.Module | DenseModel
Tokenizer = Callable[..., Any]


@typed
def compress(
    model: AnyModel,
    sparsity: float | None = None,
    *,
    target_size: int | str | None = None,
    keep_quality: float | None = None,
    method: Method | str = "rankfold",
    calibration: Any = None,
    output: str | Path | None = None,
    moments: MomentStore | str | Path | None = None,
    mode: str = "sequential",
    num_samples: int = 128,
    max_length: int = 2048,
    seed: int = 0,
    text_column: str = "text",
    on_plan: Callable[[Plan], None] | None = None,
    tokenizer: Tokenizer | None = None,
    component: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    offload: str | Path | None = None,
    **options: Any,
) -> CompressionResult:
    """Compress a model.

    ::

        result = rankfold.compress("HuggingFaceTB/SmolLM2-135M", 0.3, output="small")
        result = rankfold.compress(model, 0.3, calibration=["some text", "more"], tokenizer=tokenizer)
        result = rankfold.compress("HuggingFaceTB/SmolLM2-135M", target_size="200MB")
        result = rankfold.compress("HuggingFaceTB/SmolLM2-135M", keep_quality=0.9)
        result.model.generate(...)

    Args:
        model: hub id, folder, ``.gguf`` file, a transformers model in memory, or what :func:`open_model` returned. It
            is not changed.
        sparsity: fraction of the weights to remove; by default that of the method, 0.3 for most.
        target_size: in place of a sparsity, the bytes that all weights may take in the dtype written, such as
            ``"400MB"`` (1e6 each), ``"1.5GiB"`` (2^30) or a number. Implies ``scope="model"`` and ``budget="bytes"``.
            With a dtype, such as ``"80MB:q4_0"``, the bytes of the GGUF file that :func:`export` makes of the result in
            that dtype and the form ``gguf-deci``. Implies ``scope="model"`` and ``target="llama.cpp"``; for Qwen 3 and
            Gemma 3 the form ``gguf``, ``target="stock"`` and ``allocation="uniform"``.
        keep_quality: in place of a sparsity, the fraction in (0, 1) of the likelihood of a held-out token that is to be
            kept: the dense model's perplexity over the compressed one's. The largest sparsity that keeps it is
            predicted, run, measured, and corrected in a second run, at most a fourth
            (:func:`rankfold.quality.compress_to_keep`).
        method: name of a method, or a configured one such as ``rankfold.MoDeGPT(sparsity=0.3, modules=("mlp",))``.
        calibration: what the model is measured on, see :func:`load_calibration`; by default ``mixture``: encyclopedia,
            web text, source code and other languages.
        output: folder to write, block by block. The same call goes on where a killed one was. ``None``: in memory only.
        moments: of the dense model, from :func:`calibrate` or the folder it wrote; in place of ``calibration``. Implies
            ``mode="one-pass"``.
        mode: ``sequential``: every block is measured on what the compressed blocks before it produce (MoDeGPT App.
            B.2). ``one-pass``: all blocks are measured on the dense model.
        num_samples: samples of the calibration set, of all texts together.
        max_length: tokens of a sample, at most the model's context.
        seed: order in which samples are drawn.
        text_column: column of the text in a ``datasets.Dataset``, rows or a file with rows.
        on_plan: called with the plan before any block is compressed.
        tokenizer: of a model in memory; a processor for a model of images and text.
        component: ``language``, ``vision`` or ``projector``; see :func:`open_model`.
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``, in which weights are written.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        revision: branch, tag or commit of a hub id.
        offload: keep the hidden states of the samples in host memory (``cpu``), or in a file in this folder; see
            :func:`open_model`.
        options: of a method that is given by name, such as ``modules=("mlp", "vo")``.

    Returns:
        The compressed model (``.model``), the plan, the record, and the folder written.

    Raises:
        OptionError, UnsupportedModelError, NumericsError, CheckpointError, DataError: with one line saying what to do.
    """
    goal = _goal(sparsity, target_size, keep_quality)
    method = _configured(compress, method, sparsity, options)
    calibration, moments = _measured_by(calibration, moments)
    if calibration is None and moments is None:
        calibration = DEFAULT_TEXT
    pipeline.check_request(method, calibration, moments, mode, output)
    moments, source = _stored(moments, offload), _opened(model, tokenizer, component, dtype, device, revision, offload)
    tokens = _loaded(calibration, source, tokenizer, num_samples, max_length, seed, text_column)
    how: dict[str, Any] = {"moments": moments, "mode": mode, "on_plan": on_plan}
    if keep_quality is not None:
        return compress_to_keep(source, method, keep_quality, tokens, output, **how)
    method = method_of_size(source, method, goal)
    return pipeline.compress(source, method, tokens, output, **how, goal=goal)


@typed
def plan(
    model: AnyModel | PretrainedConfig,
    sparsity: float | None = None,
    *,
    target_size: int | str | None = None,
    keep_quality: float | None = None,
    method: Method | str = "rankfold",
    calibration: Any = None,
    moments: MomentStore | str | Path | None = None,
    num_samples: int = 128,
    max_length: int = 2048,
    seed: int = 0,
    text_column: str = "text",
    tokenizer: Tokenizer | None = None,
    component: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    offload: str | Path | None = None,
    gpu: str | None = None,
    gpus: int = 1,
    **options: Any,
) -> Plan:
    """Return what :func:`compress` would do: ranks, counts, cache, memory, and with moments the error of every module.

    ::

        rankfold.plan("big-model", 0.3, gpu="80GB", gpus=8)  # a folder with config.json is enough

    Args:
        model: as for :func:`compress`; with ``gpu`` also a config of transformers, or a folder or hub id of which the
            config alone is read.
        keep_quality: as for :func:`compress`; the plan is of its first run. The allocation must be ``measured``.
        calibration: as for :func:`compress`. Without it and without moments, ``mixture`` where the allocation
            compares predictions; else shapes are enough.
        moments: of the dense model, for predicted errors and for allocations that go by them.
        gpu: plan for accelerators that are not here, from shapes alone: memory of each, such as ``80GB``, or a name out
            of ``compression/cards.json``, such as ``h100``. Ranks are uniform where the method's own go by numbers of
            the model; time is predicted from the card's rates.
        gpus: accelerators that share the calibration samples.

    All other arguments are those of :func:`compress`.

    Raises:
        OptionError, UnsupportedModelError, CheckpointError: as :func:`compress`; and with ``gpu`` what it does not go
            with.
    """
    goal = _goal(sparsity, target_size, keep_quality)
    method = _configured(plan, method, sparsity, options)
    if gpu is not None:
        given = {"calibration": calibration, "moments": moments, "tokenizer": tokenizer, "component": component}
        given |= {"keep_quality": keep_quality}
        given |= {"device": None if device == "auto" else device}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise OptionError(
                f"a plan for {option('gpu')} goes by shapes alone, so {wrong[0]} has no effect; leave it out"
            )
        source = open_outline(_shaped(model), dtype=resolve_dtype(dtype), revision=revision)
        if offload is not None:  # not `resolve_offload`: the folder is on the machine that is planned for
            source.offload = Offload(source.device, None if offload == "cpu" else Path(offload))
        method = method_of_size(source, method, goal)
        samples = planned_samples(num_samples, min(max_length, source.context_length))
        return predict(source, method, samples, find_card(gpu), gpus)
    if isinstance(model, PretrainedConfig):
        raise OptionError(
            f"{type(model).__name__} has no weights; give {option('gpu', '80GB')} for a plan of its shapes"
        )
    if gpus != 1:
        raise OptionError(
            f"gpus is of a plan for accelerators that are not here, got {gpus}; give gpu too, or leave it out"
        )
    calibration, moments = _measured_by(calibration, moments)
    moments, source = _stored(moments, offload), _opened(model, tokenizer, component, dtype, device, revision, offload)
    if calibration is None and moments is None and method.allocation.needs_text:
        calibration = DEFAULT_TEXT
    tokens = _loaded(calibration, source, tokenizer, num_samples, max_length, seed, text_column)
    method = method_of_size(source, method, goal)
    if keep_quality is not None:
        method = method_to_keep(source, method, keep_quality, tokens, moments)
    return pipeline.plan(source, method, tokens, moments=moments, goal=goal)


@typed
def calibrate(
    model: AnyModel,
    calibration: Any = DEFAULT_TEXT,
    output: str | Path | None = None,
    *,
    statistics: set[str] | None = None,
    num_samples: int = 128,
    max_length: int = 2048,
    seed: int = 0,
    text_column: str = "text",
    tokenizer: Tokenizer | None = None,
    component: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    offload: str | Path | None = None,
) -> MomentStore:
    """Measure the second moments of every block of a dense model once, to compress it many times.

    Args:
        output: folder to keep the moments in; ``None``: in memory. The call reads and checks what an earlier one left
            there, and measures only what is missing or damaged.
        statistics: names out of :data:`rankfold.calibration.statistics.STATISTICS`; all by default, so that any method
            can be computed from them.

    All other arguments are those of :func:`compress`.

    Raises:
        OptionError: there is no statistic of a name, or none that one pass of the dense model can measure.
        NumericsError: a weight or activation is NaN or infinite.
        CheckpointError: ``output`` holds something else, or another process writes it.
    """
    source = _opened(model, tokenizer, component, dtype, device, revision, offload)
    calibration = DEFAULT_TEXT if calibration is None else calibration
    tokens = present(_loaded(calibration, source, tokenizer, num_samples, max_length, seed, text_column))
    return pipeline.calibrate(source, tokens, output, statistics=statistics)


@typed
def export(
    model: str | Path | PreTrainedModel | CompressionResult,
    output: str | Path,
    format: str = "stock",
    *,
    dtype: str = "auto",
    calibration: Any = DEFAULT_TEXT,
    num_samples: int = 32,
    max_length: int = 2048,
    seed: int = 0,
    text_column: str = "text",
    tokenizer: Tokenizer | None = None,
) -> Exported:
    """Write a compressed model in another form, padded with zeros as little as that form allows.

    Args:
        model: hub id, folder, the model in memory, or what :func:`compress` returned.
        output: folder or file to write; must not exist.
        format: one of :data:`rankfold.exports.FORMATS`.
        dtype: what is written in: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``; GGUF files also
            ``q8_0``, ``q5_0`` and ``q4_0``.
        calibration: text that ``q5_0`` and ``q4_0`` are rounded for; see :func:`load_calibration`.
        num_samples: of all texts together.
        max_length: tokens of a sample.
        seed: of the draw.
        text_column: in a file with rows.
        tokenizer: of a model in memory.

    Raises:
        OptionError, DataError, UnsupportedModelError, CheckpointError: see :func:`rankfold.exports.export`.
    """
    text = RoundingText(calibration, num_samples, max_length, seed, text_column)
    with _in_folder(model, tokenizer) as folder:
        return exports.export(folder, output, format, dtype=dtype, text=text)


@typed
def perplexity(
    model: AnyModel | CompressionResult,
    samples: Tensor | CalibrationData,
    *,
    autocast: torch.dtype | None = None,
    dtype: str = "auto",
    device: str = "auto",
    stream: bool = False,
) -> dict[str, Any]:
    """Compute the perplexity of a model, dense or compressed, on samples of tokens.

    Args:
        model: hub id, folder, ``.gguf`` file, a model in memory, an open model, or what :func:`compress` returned.
        samples: ``(W, T)`` token ids, or a calibration set of text, of which all samples are used.
        autocast: run the forward under autocast in this dtype.
        dtype: of a model that is not in memory, see :func:`load`.
        device: of a model that is not in memory.
        stream: read a hub id or folder one block at a time, where the model is larger than memory.

    Returns:
        ``{"perplexity", "nll", "windows", "length", "tokens", "definition"}``; ``nll`` in nats per predicted token.
        With ``stream`` also ``peak_memory_bytes`` and ``peak_device_memory_bytes``.

    Raises:
        DataError: the samples are none, or too short to predict a token.
        NumericsError: a sample has no finite loss.
        OptionError: the model is none of transformers; or it is to be streamed and can be read as a whole only.
    """
    ids: Any = samples.ids if isinstance(samples, CalibrationData) else samples  # what is no text is refused there
    if stream:
        if not isinstance(model, str | Path):
            raise OptionError("stream reads a model from the disk, and this one is in memory; leave it out")
        return evaluation.streamed_perplexity(open_streamed(model, dtype=dtype, device=device), ids, autocast=autocast)
    if isinstance(model, str | Path):
        model = load_model(model, dtype=dtype, device=device)
    elif dtype != "auto" or device != "auto":
        raise OptionError("dtype and device are of a model that is loaded, and this one is in memory; leave them out")
    elif isinstance(model, DenseModel):
        model = model.whole_model()
    elif isinstance(model, CompressionResult):
        model = model.model
    return evaluation.perplexity(model, ids, autocast=autocast)


def _goal(sparsity: float | None, target_size: int | str | None, keep_quality: float | None) -> Goal | None:
    """Return what a run of a given size is for.

    Raises:
        OptionError: more than one of them.
    """
    asked = {"sparsity": sparsity, "target_size": target_size, "keep_quality": keep_quality}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} each say how much is removed; give one of them")
    return goal_of(target_size, keep_quality)


def _configured(
    function: Callable[..., Any], method: Method | str, sparsity: float | None, options: dict[str, Any]
) -> Method:
    """Return a method, made by its name or as it was given.

    Args:
        function: that was called; its arguments are suggested beside the method's options.

    Raises:
        OptionError: an option that the method does not have, or beside a method that has options of its own.
    """
    asked = options if sparsity is None else options | {"sparsity": sparsity}
    if isinstance(method, str):
        own = [field.name for field in dataclasses.fields(method_class(method))]
        known = dict.fromkeys([*own, *inspect.signature(function).parameters])  # sparsity is in both
        del known["options"]
        for name in options:
            check_choice(f"argument, or option of {method},", name, known)
        return make_method(method, **asked)
    for name, value in asked.items():
        own = getattr(method, name, None)
        if own != value:
            raise OptionError(
                f"{name}={value!r} with a method that has {name}={own!r}; give it to {type(method).__name__}(...) alone"
            )
    return method


def _shaped(model: AnyModel | PretrainedConfig) -> str | Path | PretrainedConfig:
    """Return what an outline is made of."""
    if isinstance(model, DenseModel):
        model = model.model
    # A transformers model has a config.
    return model.config if isinstance(model, nn.Module) else model  # pyright: ignore[reportReturnType]


def _measured_by(calibration: Any, moments: MomentStore | str | Path | None) -> tuple[Any, Any]:
    """Return the calibration set and the moments; these may be given as what calibrates."""
    return (None, calibration) if isinstance(calibration, MomentStore) and moments is None else (calibration, moments)


def _stored(moments: MomentStore | str | Path | None, offload: str | Path | None) -> MomentStore | None:
    if moments is not None and offload is not None:
        raise OptionError(
            "offload keeps the hidden states of text that is measured, and moments are measured already; "
            "leave one of them out"
        )
    return MomentStore.open(moments) if isinstance(moments, str | Path) else moments


def _opened(
    model: AnyModel,
    tokenizer: Tokenizer | None,
    component: str | None,
    dtype: str,
    device: str,
    revision: str | None,
    offload: str | Path | None,
) -> DenseModel:
    """Open a model, unless it is open."""
    given: dict[str, Any] = {"component": component, "revision": revision, "offload": offload}
    if not isinstance(model, DenseModel):
        return validated(open_model(model, tokenizer=tokenizer, dtype=dtype, device=device, **given))
    given |= {name: None if value == "auto" else value for name, value in {"dtype": dtype, "device": device}.items()}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise OptionError(f"the model is open already, and {', '.join(wrong)} is for opening it; give it to open_model")
    return model if tokenizer is None else model.with_tokenizer(tokenizer)


def _loaded(
    calibration: Any,
    source: DenseModel,
    tokenizer: Tokenizer | None,
    num_samples: int,
    max_length: int,
    seed: int,
    text_column: str,
) -> CalibrationData | None:
    """Load a calibration set, unless it is one, or there is none."""
    how: dict[str, Any] = {
        "num_samples": num_samples,
        "max_length": max_length,
        "seed": seed,
        "text_column": text_column,
    }
    if calibration is not None and not isinstance(calibration, CalibrationData):
        return load_calibration(calibration, source, tokenizer=tokenizer, **how)
    if [*how.values()] != [128, 2048, 0, "text"]:
        what = "there is no calibration set" if calibration is None else "the calibration set is loaded already"
        raise OptionError(f"{what}, so {', '.join(how)} have no effect; leave them out")
    return calibration


@contextlib.contextmanager
def _in_folder(
    model: str | Path | PreTrainedModel | CompressionResult, tokenizer: Tokenizer | None
) -> Generator[str | Path]:
    """Write a model that is in memory only to a folder for a while; the folder has the name it was loaded by."""
    if isinstance(model, CompressionResult) and model.output:
        model = model.output
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise OptionError(
                "tokenizer is of a model in memory, and this one lies in a folder with its own; leave it out"
            )
        yield model
        return
    held = model.model if isinstance(model, CompressionResult) else model
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, Path(getattr(held, "name_or_path", "")).name or type(held).__name__)
        if not isinstance(model, CompressionResult):
            save_model(model, folder, tokenizer)
        elif tokenizer is None:
            model.save_pretrained(folder)
        else:
            save_model(held, folder, tokenizer)
        yield folder


compress_components = typed(compress_components)
evaluate_text = typed(evaluate_text)
make_method = typed(make_method)
push = typed(exports.push)
load = typed(load_model, "load")
save = typed(save_model, "save")
open_model = typed(open_model, tokenizer=Tokenizer | None)
# Calibration lies below the models, so its functions cannot name them.
load_calibration = typed(load_calibration, model=DenseModel, tokenizer=Tokenizer | None)
