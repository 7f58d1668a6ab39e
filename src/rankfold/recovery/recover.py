"""Give a compressed model back some of what it lost, by a few minutes of distillation (MoDeGPT App. B.6, B.7).

compressed model --- tuned weights ---> Trainer: KL to the dense model's predictions ---> best state on held-out text
                                                                                                 |
                                          an ordinary checkpoint <--- merged, as stored <--------+  (or what went in)
"""

import contextlib
import copy
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .._utils.arguments import typed
from .._utils.files import write_json, write_text
from ..calibration.likelihood import warn_of_guessing
from ..checkpoint.load import described, load_model
from ..checkpoint.run import RunFolder
from ..checkpoint.saving import creating
from ..checkpoint.streamed import open_streamed
from ..compression.probe_texts import describe_probe_texts
from ..compression.result import CompressionResult
from ..data.built_in import DEFAULT_TEXT
from ..data.calibration_data import CalibrationData, shown
from ..data.load import load_calibration
from ..data.mixing import expanded, shares_of
from ..data.probes import Probes, load_probes
from ..errors import CheckpointError, DataError, OptionError, option
from ..models.auto_classes import auto_class
from ..models.dense_model import DenseModel
from ..models.given import resolve_model
from ..models.opening import open_model, stored_dtype
from ..models.whole import read_config
from ..report.model_card import model_card
from ..report.record import NAME, read_record
from . import blockwise as by_block
from .judging import gains, nats, why_not, worse_kinds
from .loss import Loss
from .options import Options, Settings, check, check_blockwise
from .tuning import LEARNING_RATES, Tune, check_trainable
from .whole import WholeModel

log = logging.getLogger(__name__)

TRAINING = "recovery.json"  # beside a model without a run record

Run = WholeModel | by_block.Blockwise


@dataclass(frozen=True)
class RecoveryResult:
    """The result of a recovery."""

    model: nn.Module | None  # the recovered model, or what went in; None: too large to be in memory, in ``output`` only
    record: dict  # what was trained on what, and perplexities before and after
    recovered: bool  # False: no text gained, or one lost more than the tolerance, so the model is what went in
    output: Path | None = None


@dataclass(frozen=True)
class Given:
    """A compressed model that is to be trained."""

    model: Any  # in fp32; a DenseModel where blocks are read one at a time
    record: dict
    folder: Path | None
    written: torch.dtype


@typed
def recover(
    model: str | Path | PreTrainedModel | CompressionResult,
    teacher: str | Path | PreTrainedModel | DenseModel | None = None,
    *,
    calibration: str | Path | Sequence[str | Path] | Mapping[str, float] = DEFAULT_TEXT,
    output: str | Path | None = None,
    tune: Tune = "all",
    loss: Loss = "kl",
    tokens: int = 1_000_000,
    minutes: float | None = None,
    rank: int = 16,
    lr: float | None = None,
    batch_tokens: int = 4096,
    max_length: int = 512,
    tolerance: float = 0.02,
    adapter: bool = False,
    blockwise: bool = False,
    cache_logits: str | Path | None = None,
    gradient_checkpointing: bool = False,
    report_to: str = "none",
    seed: int = 0,
    text_column: str = "text",
    device: str = "auto",
) -> RecoveryResult:
    """Train a compressed model for a few minutes to predict what the dense one predicts.

    Held-out sequences of every text are scored before, during and after. The best state is kept, and where no text gains or
    one loses more than the tolerance, what went in is given back.

    Args:
        model: folder or hub id of what ``compress`` wrote, what it returned, or the model in memory, which is not changed.
        teacher: the dense model; by default the one that ``compress`` had, or the one on the hub that the record of the
            checkpoint names.
        calibration: texts to train on, as for :func:`rankfold.compress`; shares as numbers.
        output: folder to write, resumable while it is unfinished; ``None``: in memory.
        tune: ``all``: all weights but embeddings and head. ``lora``: adapters on all linear layers. ``lora-mlp``: on those of
            the MLPs. ``norms``: norms only.
        loss: ``kl``: divergence from the dense model's predictions. ``next-token``: cross entropy of the text. ``both``.
        tokens: to train on; texts that hold fewer are read several times.
        minutes: train on as many tokens, at most ``tokens``, as take about this long here.
        rank: of adapters, ``>= 1``.
        lr: largest learning rate of AdamW; 1e-4 for ``all`` (3e-4 block by block), 5e-4 for adapters, 1e-3 for norms. It
            rises over 5 % of the steps, three at least (half of a shorter run), and falls along a cosine.
        batch_tokens: tokens of a step.
        max_length: tokens of a sequence.
        tolerance: how much the perplexity of a text may rise, as a fraction.
        adapter: write a PEFT adapter for the compressed model instead of merging it.
        gradient_checkpointing: compute activations again in the backward pass, for less memory.
        blockwise: train one block at a time, towards the dense model's states after it, with one block and its optimiser in
            memory; for folders, into a folder.
        cache_logits: folder for what the dense model predicts on the texts: it is computed once, and the dense model is not in
            memory while the compressed one is trained. A folder with the same of an earlier run is read.
        report_to: of Trainer, e.g. ``tensorboard``.
        text_column: of texts in files with rows.

    Raises:
        OptionError: an option out of range, or of another ``tune``; a teacher with another vocabulary.
        UnsupportedModelError: factors are quantised, or the model predicts no next token.
        CheckpointError: the folder holds the unfinished run of other options, or the cache is of other texts or another
            teacher.
    """
    rates = by_block.LEARNING_RATES if blockwise else LEARNING_RATES
    lr = rates.get(tune, 0.0) if lr is None else lr
    options = Options(tune, loss, tokens, rank, lr, batch_tokens, max_length, tolerance, seed, text_column)
    settings = Settings(minutes, adapter, gradient_checkpointing, report_to, cache_logits)
    if blockwise:
        check_blockwise(options, settings, output)
    check(options, settings, output)
    given = (_streamed if blockwise else _student)(model, device)
    student: PreTrainedModel = given.model.model if blockwise else given.model
    check_trainable(student, tune)
    known = model.dense if isinstance(model, CompressionResult) else None
    teacher = teacher or known or _teacher_of(given.record)
    source = teacher if isinstance(teacher, DenseModel) else open_model(teacher, device=device)
    if source.config.vocab_size != (known := student.config.get_text_config().vocab_size):
        raise OptionError(
            f"the teacher has {source.config.vocab_size:,} tokens and the model {known:,}; give the dense model that it was "
            "compressed from"
        )
    kept = by_block.kept_of(given.model, source, given.record) if blockwise else None
    texts = _texts(calibration, source, options, tokens / max_length / (by_block.EPOCHS if blockwise else 1))
    probes = _probes(source, given.record)
    identity = {
        **asdict(options),
        "teacher": source.fingerprint,
        "texts": {name: one.describe() for name, one in texts.items()},
    }
    if blockwise:
        identity |= {"blockwise": True, "loss": "states"}
    begin, output = time.monotonic(), Path(output) if output else None
    with _working(output, identity) as work:
        common: dict = {"written": given.written, "work": work}
        run: Run = (
            WholeModel(given.model, source, texts, probes, options, settings, keep=output is not None, **common)
            if kept is None
            else by_block.Blockwise(given.model, source, kept, texts, probes, options, **common)
        )
        dense, before, after, facts = run.train()
        for name, mean in nats(dense).items():
            warn_of_guessing(mean, source.config.vocab_size, name)
        on_probes, measured = run.probe_losses(), given.record.get("probe_texts")
        worse = (
            worse_kinds(probes, measured["kinds"], on_probes, tolerance) if probes and measured and on_probes else {}
        )
        reason = why_not(before, after, worse, tolerance)
        recovered, record = reason is None, given.record
        facts |= {**identity, "teacher_name": source.name, "recovered": recovered, "unchanged_because": reason}
        facts |= {"held_out": gains(dense, before, after)}
        if recovered and probes and on_probes:
            sparsity, vocabulary = record["counts"]["sparsity"], source.config.vocab_size
            facts |= {"probe_texts_before": measured}
            again = describe_probe_texts(probes, on_probes.dense, on_probes.after, sparsity, vocabulary)
            record = record | {"probe_texts": again}
        record = record | {"recovery": facts | {"seconds": time.monotonic() - begin}}
        if recovered:
            _describe(run.model.config, texts, record)
        else:
            log.warning(
                "NOTHING WAS RECOVERED, the model is what went in: %s; train on other text, more tokens, or with a smaller lr",
                reason,
            )
            if isinstance(run, WholeModel):
                run.give_back(_student(model, device).model)
        run.cast()
    if output is None:
        return RecoveryResult(run.network, record, recovered)
    unchanged = None if recovered else given.folder
    adapted = adapter and recovered
    card = None if adapted or "plan" not in record else _card(run.model, record, output)
    _write(output, run, record, card, unchanged)
    shutil.rmtree(work)
    return RecoveryResult(run.network, record, recovered, output)


def _student(model, device: str) -> Given:
    """Load a model to train in fp32."""
    known = {}
    if isinstance(model, CompressionResult):
        model, known = model.output or model.model, model.record
    if isinstance(model, PreTrainedModel):
        return Given(copy.deepcopy(model).float(), dict(known), None, model.dtype)
    folder, record, written = _read(model)
    return Given(load_model(folder, dtype="float32", device=device), record, folder, written)


def _streamed(model, device: str) -> Given:
    """Open a model to train in fp32, one block at a time."""
    place = model.output if isinstance(model, CompressionResult) else model
    if place is None or isinstance(place, PreTrainedModel):
        raise OptionError(
            f"{option('blockwise', True)} reads one block at a time, and the model is in memory; write it to a folder, or "
            f"leave {option('blockwise')} out"
        )
    folder, record, written = _read(place)
    return Given(open_streamed(folder, dtype="float32", device=device), record, folder, written)


def _read(model: str | Path) -> tuple[Path, dict, torch.dtype]:
    """Return the folder of a model, its record, and the dtype it is stored in."""
    folder, weights = resolve_model(model)
    record = read_record(folder) if (folder / NAME).exists() else {}
    return folder, record, stored_dtype(read_config(folder), weights) if weights else torch.float32


def _teacher_of(record: dict) -> str:
    if record.get("base_model", "").count("/") != 1:  # the name of a folder, which may be anywhere
        raise OptionError(
            f"the dense model {record['base_model']!r} was a local one; give its path as teacher"
            if "base_model" in record
            else "the model has no record of what it was compressed from; give the dense model as teacher"
        )
    return f"{record['base_model']}@{record['revision']}" if "revision" in record else record["base_model"]


def _texts(calibration, source: DenseModel, options: Options, sequences: float) -> dict[str, CalibrationData]:
    """Return name -> sequences to train on, as many of all together, and held-out ones; of every text its share."""
    how: dict = {"max_length": options.length, "seed": options.seed, "text_column": options.text_column}
    found = {}
    for text, share in expanded(shares_of(calibration)).items():
        name, samples = shown(text), max(1, round(sequences * share))
        if name in found:
            raise OptionError(f"two texts are called {name!r}; rename one")
        found[name] = load_calibration(text, source, num_samples=samples, **how)
        if found[name].held_out is None:
            raise OptionError(
                f"text {name!r} has a single sequence, so none can be held out; give more text or a smaller max_length"
            )
    return found


@contextlib.contextmanager
def _working(output: Path | None, identity: dict) -> Iterator[Path]:
    """Hold the folder of an unfinished run, which a killed one leaves to the next."""
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    run = RunFolder(output, json.loads(json.dumps(identity)))  # as it will be read
    with run.working():
        yield run.path


def _probes(source: DenseModel, record: dict) -> Probes | None:
    """Return the probe texts, to be measured again; ``None`` where the record has none, or they cannot be read any more."""
    if "kinds" not in (record.get("probe_texts") or {}):
        return None
    try:
        return load_probes(source)
    except (CheckpointError, DataError) as error:
        log.info("probe texts are not measured again: %s", error)
        return None


def _describe(config, texts: dict[str, CalibrationData], record: dict) -> None:
    """Write into the config of a compressed model what it was trained on, and its probe texts."""
    if (description := described(config)) is None:
        return
    fields = description if isinstance(description, dict) else description.fields
    fields["trained_on"] = [one.origin for one in texts.values()]  # perplexity there is too good
    if "probe_texts_before" in record["recovery"]:
        fields["probe_texts"] = record["probe_texts"]


def _card(student: PreTrainedModel, record: dict, output: Path) -> str:
    auto = auto_class(student.config, type(student).__name__).__name__
    return model_card(record, output.name, stock=described(student.config) is None, auto=auto)


def _write(output: Path, run: Run, record: dict, card: str | None, unchanged: Path | None) -> None:
    """Write the checkpoint, or the adapter where the network still has one; an unchanged model is copied."""
    with creating(output) as unfinished:
        if unchanged is not None:
            shutil.copytree(unchanged, unfinished)
        else:
            run.write(unfinished)
        if card is not None:
            write_text(unfinished / "README.md", card)
        # What was not compressed by rankfold has no record that `read_record` would take.
        write_json(unfinished / (NAME if "plan" in record else TRAINING), record)
