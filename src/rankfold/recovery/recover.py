"""Give a compressed model back some of what it lost, by a few minutes of distillation (MoDeGPT App. B.6, B.7).

compressed model --- tuned weights ---> Trainer: KL to the dense model's predictions ---> best state on held-out text
                                                                                                 |
                                          an ordinary checkpoint <--- merged, as stored <--------+  (or what went in)
"""

import contextlib
import copy
import functools
import itertools
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
from transformers.integrations import get_available_reporting_integrations

from .._utils.arguments import typed
from .._utils.evaluating import evaluating
from .._utils.files import check_output, read_json, write_json, write_text
from .._utils.processes import launched_count
from ..checkpoint.load import described, load_model
from ..checkpoint.run import RunFolder
from ..checkpoint.saving import creating
from ..compression.probe_texts import describe_probe_texts
from ..compression.result import CompressionResult
from ..data.built_in import DEFAULT_TEXT
from ..data.calibration_data import CalibrationData, shown
from ..data.load import load_calibration
from ..data.mixing import expanded, shares_of
from ..data.probes import load_probes
from ..errors import CheckpointError, DataError, OptionError
from ..linalg.stochastic_rounding import round_stochastically
from ..models.auto_classes import auto_class
from ..models.dense_model import DenseModel
from ..models.given import resolve_model
from ..models.opening import open_model, stored_dtype
from ..models.tokenizer import save_tokenizer
from ..models.whole import read_config
from ..report.model_card import model_card
from ..report.record import NAME, read_record
from .judging import Judge, allowed, gains, nats, score, token_losses
from .loss import Head, Loss
from .training import Distiller, KeepZeros, MarkWhole, Progress, arguments, last_checkpoint
from .tuning import LEARNING_RATES, Tune, check_trainable, mask_of_zeros, prepared, without_dropout

log = logging.getLogger(__name__)

STEPS = "steps.json"
TRAINING = "recovery.json"  # beside a model without a run record
SCORES = 10  # times that held-out text is scored during a run
SCORING = 0.2  # of the minutes given, at most


@dataclass(frozen=True)
class Options:
    """The options of a run; equal options, models and texts give equal weights."""

    tune: Tune
    loss: Loss
    tokens: int
    rank: int
    lr: float
    batch_tokens: int
    length: int
    tolerance: float
    seed: int
    text_column: str


@dataclass(frozen=True)
class RecoveryResult:
    """The result of a recovery."""

    model: nn.Module  # the recovered model, or what went in
    record: dict  # what was trained on what, and perplexities before and after
    recovered: bool  # False: no text gained, or one lost more than the tolerance, so the model is what went in
    output: Path | None = None


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
        lr: largest learning rate of AdamW; 1e-4 for ``all``, 5e-4 for adapters, 1e-3 for norms. It rises over 5 % of the
            steps, three at least (half of a shorter run), and falls along a cosine.
        batch_tokens: tokens of a step.
        max_length: tokens of a sequence.
        tolerance: how much the perplexity of a text may rise, as a fraction.
        adapter: write a PEFT adapter for the compressed model instead of merging it.
        gradient_checkpointing: compute activations again in the backward pass, for less memory.
        report_to: of Trainer, e.g. ``tensorboard``.
        text_column: of texts in files with rows.

    Raises:
        OptionError: an option out of range, or of another ``tune``; a teacher with another vocabulary.
        UnsupportedModelError: factors are quantised, or the model predicts no next token.
        CheckpointError: the folder holds the unfinished run of other options.
    """
    lr = LEARNING_RATES[tune] if lr is None else lr
    options = Options(tune, loss, tokens, rank, lr, batch_tokens, max_length, tolerance, seed, text_column)
    _check(options, minutes, adapter, output, report_to)
    student, record, folder, written = _student(model, device)
    check_trainable(student, tune)
    known = model.dense if isinstance(model, CompressionResult) else None
    teacher = teacher or known or _teacher_of(record)
    source = teacher if isinstance(teacher, DenseModel) else open_model(teacher, device=device)
    if source.config.vocab_size != (known := student.config.get_text_config().vocab_size):
        raise OptionError(
            f"the teacher has {source.config.vocab_size:,} tokens and the model {known:,}; give the dense model that it was "
            "compressed from"
        )
    texts = _texts(calibration, source, options)
    identity = {
        **asdict(options),
        "teacher": source.fingerprint,
        "texts": {name: one.describe() for name, one in texts.items()},
    }
    begin, output = time.monotonic(), Path(output) if output else None
    with _working(output, identity) as work:
        dense: Any = source.whole_model()
        run = _Run(student, dense, texts, options, work)
        of_dense, scored = score(dense, Head(dense), run.held_out), time.monotonic()
        before = score(student, Head(student), run.held_out)
        scoring = time.monotonic() - scored  # seconds
        seconds = None if minutes is None else (60 * minutes, scoring)
        settings: dict = {"report_to": report_to, "keep": output is not None}
        if gradient_checkpointing:
            settings["gradient_checkpointing"] = True
        network, facts = run.train(nats(before), seconds, settings)
        if not adapter and network is not student:
            network = student = network.merge_and_unload()
        _round(student, written, seed)
        after = score(network, Head(student), run.held_out)
        recovered = facts["best_step"] > 0 and allowed(nats(before), nats(after), tolerance)
        facts |= {**identity, "teacher_name": source.name, "recovered": recovered}
        facts |= {"held_out": gains(of_dense, before, after)}
        if recovered:
            record, facts = _probed_again(record, facts, source, run, network)
        record |= {"recovery": facts | {"seconds": time.monotonic() - begin}}
        if not recovered:
            log.warning(
                "NOTHING WAS RECOVERED: no held-out text gains, or one loses more than %.0f %%, so the model is what went in; "
                "train on other text, more tokens, or with a smaller lr",
                100 * tolerance,
            )
            network = student = _student(model, device)[0]
            adapter = False
        for parameter in student.parameters():
            parameter.data = parameter.data.to(written) if parameter.is_floating_point() else parameter.data
        student.config.dtype = written
        if recovered and (description := described(student.config)) is not None:
            fields = description if isinstance(description, dict) else description.fields
            fields["trained_on"] = [one.origin for one in texts.values()]  # perplexity there is too good
            if "probe_texts_before" in facts:
                fields["probe_texts"] = record["probe_texts"]
    if output is None:
        return RecoveryResult(network.eval(), record, recovered)
    card = None if adapter or "plan" not in record else _card(student, record, output)
    _write(output, network, record, card, None if adapter else source.tokenizer, None if recovered else folder)
    shutil.rmtree(work)
    return RecoveryResult(network.eval(), record, recovered, output)


def check_alone() -> None:
    """Refuse several processes: the trainer would wait for all of them.

    Raises:
        OptionError: processes were launched together.
    """
    if launched_count() > 1:
        raise OptionError(
            f"training runs in one process, got {launched_count()}; give the command without torchrun or accelerate launch"
        )


def _check(options: Options, minutes: float | None, adapter: bool, output, report_to: str) -> None:
    check_alone()
    for name in ("tokens", "rank", "batch_tokens", "length"):
        if getattr(options, name) < 1:
            raise OptionError(f"{name} must be at least 1, got {getattr(options, name)}")
    if not (options.lr > 0 and options.tolerance >= 0 and (minutes is None or minutes > 0)):  # a NaN neither
        raise OptionError("lr and minutes must be more than 0, and tolerance at least 0")
    if not 0 <= options.seed < 2**32:
        raise OptionError(f"seed must be at least 0 and fit into 32 bits, got {str(options.seed)[:24]}")
    if report_to not in (known := ["none", "all", *get_available_reporting_integrations()]):
        raise OptionError(f"report_to must be one of {', '.join(known)}, got {report_to!r}; install what is to be used")
    if adapter and (not options.tune.startswith("lora") or output is None):
        raise OptionError("adapter=True writes the adapters of tune='lora' or 'lora-mlp' to output; give both")
    if output is not None:
        check_output(Path(output))


def _student(model, device: str) -> tuple[PreTrainedModel, dict, Path | None, torch.dtype]:
    """Return a model to train in fp32, its record, its folder, and the dtype it is written in."""
    known = {}
    if isinstance(model, CompressionResult):
        model, known = model.output or model.model, model.record
    if isinstance(model, PreTrainedModel):
        return copy.deepcopy(model).float(), dict(known), None, model.dtype
    folder, weights = resolve_model(model)
    record = read_record(folder) if (folder / NAME).exists() else {}
    return (
        load_model(folder, dtype="float32", device=device),
        record,
        folder,
        stored_dtype(read_config(folder), weights) if weights else torch.float32,
    )


def _teacher_of(record: dict) -> str:
    if record.get("base_model", "").count("/") != 1:  # the name of a folder, which may be anywhere
        raise OptionError(
            f"the dense model {record['base_model']!r} was a local one; give its path as teacher"
            if "base_model" in record
            else "the model has no record of what it was compressed from; give the dense model as teacher"
        )
    return f"{record['base_model']}@{record['revision']}" if "revision" in record else record["base_model"]


def _texts(calibration, source: DenseModel, options: Options) -> dict[str, CalibrationData]:
    """Return name -> sequences to train on and held-out ones, of every text its share."""
    how: dict = {"max_length": options.length, "seed": options.seed, "text_column": options.text_column}
    found = {}
    for text, share in expanded(shares_of(calibration)).items():
        name, samples = shown(text), max(1, round(options.tokens / options.length * share))
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


@dataclass(frozen=True)
class _Run:
    """One recovery: which model learns from which, on what, and where that is kept."""

    student: PreTrainedModel
    dense: PreTrainedModel
    texts: dict[str, CalibrationData]
    options: Options
    work: Path

    @property
    def held_out(self) -> dict[str, Any]:
        """Text -> ``(N, T)`` token ids that nothing is trained on."""
        return {name: one.held_out for name, one in self.texts.items()}

    def train(
        self, before: dict[str, float], seconds: tuple[float, float] | None, settings: dict
    ) -> tuple[Any, dict[str, Any]]:
        """Return the network with its best weights, adapters around it, and what happened.

        Args:
            before: text -> nats per token of the student.
            seconds: there are, and that scoring once takes; ``None``: as many tokens as the options say.
            settings: of :func:`.training.arguments`.
        """
        student, options, work = self.student, self.options, self.work
        masks = mask_of_zeros(student)
        network = prepared(student, options.tune, options.rank, options.seed)
        every: list[Any] = [one.ids for one in self.texts.values()]
        ids = torch.cat(every)
        batch = max(1, options.batch_tokens // ids.shape[1])
        judge = Judge(network, student, self.held_out, before, work, options.tolerance)
        callbacks = [judge, Progress(judge.note), MarkWhole(), *([KeepZeros(network, masks)] if masks else [])]
        steps = max(1, round(options.tokens / (batch * ids.shape[1])))
        make = functools.partial(
            Distiller,
            network,
            train_dataset=[{"input_ids": sequence} for sequence in ids],
            callbacks=callbacks,
            base=student,
            teacher=self.dense,
            loss=options.loss,
        )
        common = {"learning_rate": options.lr, "seed": options.seed, "device": student.device, **settings}
        args = functools.partial(arguments, work, batch=batch, length=ids.shape[1], **common)
        with without_dropout(student), evaluating(self.dense):
            scores = SCORES
            if seconds is not None:
                scores, most = _fitting(*seconds, work, network, make(args(steps=1, every=1)))
                steps = min(steps, most)
            judge.every = max(1, steps // scores)
            trainer = make(args(steps=steps, every=judge.every))
            trainer.train(resume_from_checkpoint=last_checkpoint(work))
        judge.restore_best()
        return network, {
            "steps": trainer.state.global_step,
            "tokens_seen": trainer.state.global_step * batch * ids.shape[1],
            "tuned_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
            "best_step": judge.best["step"],
            "history": judge.history,
        }


def _fitting(seconds: float, scoring: float, work: Path, network: nn.Module, trial: Distiller) -> tuple[int, int]:
    """Return how often to score, and how many steps take about the rest of so many seconds; written down, so that a killed run
    goes on with as many."""
    if not (work / STEPS).exists():
        scores = max(1, min(SCORES, int(SCORING * seconds / scoring)))
        begin, batches = time.monotonic(), trial.args.gradient_accumulation_steps
        for batch in itertools.islice(trial.get_train_dataloader(), batches):
            trial.compute_loss(network, batch).backward()
        network.zero_grad()
        left = seconds - (scores + 2) * scoring  # two before and after training
        write_json(work / STEPS, {"scores": scores, "steps": max(1, int(left / (time.monotonic() - begin)))})
    found = read_json(work / STEPS)
    return found["scores"], found["steps"]


def _round(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Round weights to what will be written of them, so that steps below half a unit in the last place are not lost."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = round_stochastically(parameter.data, dtype, generator).to(parameter.dtype)


def _probed_again(record: dict, facts: dict, source: DenseModel, run: _Run, network: nn.Module) -> tuple[dict, dict]:
    """Return the record with the probe texts as the trained network predicts them, and the facts with what they were before.

    Both stay as they are where the record has no probe texts, or the tokenizer of the dense model cannot read them any more.
    """
    measured = record.get("probe_texts") or {}
    if "kinds" not in measured:
        return record, facts
    try:
        probes = load_probes(source)
    except (CheckpointError, DataError) as error:
        log.info("probe texts are not measured again: %s", error)
        return record, facts
    dense = token_losses(run.dense, Head(run.dense), probes.ids)
    trained = token_losses(network, Head(run.student), probes.ids)
    sparsity, vocabulary = record["counts"]["sparsity"], source.config.vocab_size
    again = describe_probe_texts(probes, dense, trained, sparsity, vocabulary)
    return record | {"probe_texts": again}, facts | {"probe_texts_before": measured}


def _card(student: PreTrainedModel, record: dict, output: Path) -> str:
    auto = auto_class(student.config, type(student).__name__).__name__
    return model_card(record, output.name, stock=described(student.config) is None, auto=auto)


def _write(output: Path, network: Any, record: dict, card: str | None, tokenizer, unchanged: Path | None) -> None:
    """Write the checkpoint, or the adapter where the network still has one; an unchanged model is copied."""
    with creating(output) as unfinished:
        if unchanged is not None:
            shutil.copytree(unchanged, unfinished)
        else:
            unfinished.mkdir()
            network.save_pretrained(unfinished)
            if tokenizer is not None:
                save_tokenizer(tokenizer, unfinished)
        if card is not None:
            write_text(unfinished / "README.md", card)
        # What was not compressed by rankfold has no record that `read_record` would take.
        write_json(unfinished / (NAME if "plan" in record else TRAINING), record)
