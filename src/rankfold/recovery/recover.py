"""Give a compressed model back some of what it lost, by a few minutes of distillation (MoDeGPT App. B.6, B.7).

compressed model --- tuned weights ---> Trainer: KL to the dense model's predictions ---> best state on held-out text
                                                                                                 |
                                          an ordinary checkpoint <--- merged, as stored <--------+  (or what went in)
"""

import contextlib
import functools
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .._utils.arguments import typed
from .._utils.files import copy_folder, write_json, write_text
from .._utils.processes import on_first, process_count
from ..calibration.likelihood import warn_of_guessing
from ..checkpoint.load import described
from ..checkpoint.run import CONFIG, RunFolder
from ..checkpoint.saving import creating
from ..compression.probe_texts import describe_probe_texts
from ..data.built_in import DEFAULT_TEXT
from ..data.calibration_data import CalibrationData, shown
from ..data.load import named
from ..data.probes import Probes
from ..models.auto_classes import auto_class_name
from ..models.dense_model import DenseModel
from ..report.model_card import model_card
from ..report.record import NAME
from . import blockwise as by_block
from .judging import ProbeLosses, gains, nats, why_not, worse_kinds
from .loss import Loss
from .opening import (
    Compressed,
    Student,
    Teacher,
    device_beside,
    load_texts,
    open_student,
    open_student_streamed,
    open_teacher,
    opened_before,
    probes_of,
)
from .options import Options, Settings, check, check_blockwise, check_device
from .tuning import Tune, check_trainable
from .whole import WholeModel

log = logging.getLogger(__name__)

TRAINING = "recovery.json"  # beside a model without a run record
LOGS = "runs"  # what Trainer writes for TensorBoard

Run = WholeModel | by_block.Blockwise


@dataclass(frozen=True)
class RecoveryResult:
    """The result of a recovery."""

    model: nn.Module | None  # the recovered model, or what went in; None: too large to be in memory, in ``output`` only
    record: dict[str, Any]  # what was trained on what, and perplexities before and after
    recovered: bool  # False: the model is what went in; record["recovery"]["unchanged_because"] has the reason
    output: Path | None = None

    def __str__(self) -> str:
        """Return one line; a notebook shows it, too."""
        facts = self.record["recovery"]
        pairs = {name: (one["perplexity_before"], one["perplexity"]) for name, one in facts["held_out"].items()}
        texts = ", ".join(f"{name} {before:.2f} -> {after:.2f}" for name, (before, after) in pairs.items())
        what = f"{facts['tokens_seen']:,} tokens" if self.recovered else "nothing was recovered"
        return f"RecoveryResult({what}; held-out perplexity of {texts}; {self.output or 'in memory'})"

    __repr__ = __str__


@typed
def recover(
    model: Compressed,
    teacher: Teacher | None = None,
    *,
    calibration: Any = DEFAULT_TEXT,
    output: str | Path | None = None,
    tune: Tune = "all",
    loss: Loss = "kl",
    tokens: int = 1_000_000,
    minutes: float | None = None,
    rank: int = 16,
    lr: float | None = None,
    batch_tokens: int = 2048,
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

    Held-out sequences of every text are scored before, during and after. The best state is kept. Where the texts do
    not gain on average, one loses more than the tolerance, or a kind of probe text loses more than 25 %, what went in
    is given back.

    Args:
        model: folder or hub id of what ``compress`` wrote, what it returned, or a model in memory; it is not changed.
        teacher: the dense model; by default the one that ``compress`` had, or the one on the hub that the record of the
            checkpoint names.
        calibration: texts to train on, as for :func:`rankfold.compress`: names with or without shares, a list of texts,
            a ``datasets.Dataset``, or token ids of one length.
        output: folder to write, resumable while it is unfinished; ``None``: in memory.
        tune: ``all``: all weights but embeddings and head. ``lora``: adapters on all linear layers, so not on the
            stacked weights of experts. ``lora-mlp``: on those of the MLPs. ``norms``: norms only.
        loss: ``kl``: divergence from the dense predictions. ``next-token``: cross entropy of the text. ``both``.
        tokens: to train on; texts that hold fewer are read several times.
        minutes: train on as many tokens, at most ``tokens``, as take about this long here.
        rank: of adapters, ``>= 1``.
        lr: largest learning rate of AdamW; by default measured by a trial step, or block by block a fraction of the
            root mean square of the weights (docs/recover.md). It rises over 5 % of the steps, three at least (half of a
            shorter run), and falls along a cosine.
        batch_tokens: tokens of a step, of all processes together where ``torchrun`` has started several.
        max_length: tokens of a sequence.
        tolerance: how much the perplexity of a text may rise, as a fraction.
        adapter: write a PEFT adapter for the compressed model instead of merging it.
        gradient_checkpointing: compute activations again in the backward pass, for less memory.
        blockwise: train one block at a time, towards the dense model's states after it, with one block and its
            optimiser in memory; for folders, into a folder.
        cache_logits: folder for what the dense model predicts on the texts: it is computed once, and the dense model is
            not in memory while the compressed one is trained. A folder with the same of an earlier run is read.
        report_to: of Trainer, e.g. ``tensorboard``, whose files go to ``runs`` in the output.
        text_column: of texts in files with rows.

    Raises:
        OptionError: an option out of range, or of another ``tune``; a teacher with another vocabulary or tokenizer, or,
            block by block, of another width; processes that cannot share a step evenly, or a script that ``torchrun``
            runs in several: only those of the command train together.
        UnsupportedModelError: factors are quantised, the model carries adapters, or it predicts no next token.
        CheckpointError: the folder holds the unfinished run of other options, or the cache is of other texts or another
            teacher.
        NumericsError: the dense or the compressed model predicts NaN.
    """
    options = Options(tune, loss, tokens, rank, lr, batch_tokens, max_length, tolerance, seed, text_column)
    settings = Settings(minutes, adapter, gradient_checkpointing, report_to, cache_logits)
    if blockwise:
        check_blockwise(options, settings, output)
    check(options, settings, output)
    teacher = opened_before(teacher, model)
    device = device_beside(teacher, device)
    given = (open_student_streamed if blockwise else open_student)(model, device)
    if not blockwise:
        check_device(given.network)
    check_trainable(given.network, tune)
    source = open_teacher(teacher, given)
    kept = by_block.kept_of(given.model, source, given.record) if blockwise else None
    texts = load_texts(calibration, source, options, tokens / max_length / (by_block.EPOCHS if blockwise else 1))
    recovery = Recovery(given, source, kept, texts, probes_of(source, given.record), options, settings)
    output = Path(output) if output else None
    with _working(output, recovery.identity) as work:
        run = recovery.started(work, keep=output is not None)
        record = recovery.train(run)
        facts = record["recovery"]
        shares = named(calibration) or dict.fromkeys(texts, 1.0)
        facts |= {"calibration": {shown(text): share for text, share in shares.items()}}
        facts |= {"adapter": adapter, "seconds": run.clock.seconds}
        facts |= {"processes": process_count()}
        if not facts["recovered"] and isinstance(run, WholeModel):
            run.give_back(open_student(model, device).model)
        run.cast()
    if output is not None:
        on_first(lambda: recovery.publish(run, record, output, work))
    return RecoveryResult(run.network, record, facts["recovered"], output)


@dataclass(frozen=True)
class Recovery:
    """One recovery, once everything is open: train, judge, write.

    Args:
        given: the compressed model.
        source: the dense model.
        kept: the block of the dense model from which every block was made; ``None``: it is trained as a whole.
        texts: name -> sequences to train on, and held-out ones.
        probes: probe texts; ``None``: they are not measured.
    """

    given: Student
    source: DenseModel
    kept: list[int] | None
    texts: dict[str, CalibrationData]
    probes: Probes | None
    options: Options
    settings: Settings

    @functools.cached_property  # training changes the model
    def identity(self) -> dict:
        """All that the trained weights depend on: an unfinished run goes on where it is the same."""
        found = {
            **asdict(self.options),
            "minutes": self.settings.minutes,
            "model": self.given.fingerprint,
            "teacher": self.source.fingerprint,
            "texts": {name: one.describe() for name, one in self.texts.items()},
        }
        return found if self.kept is None else found | {"blockwise": True, "loss": "states"}

    def started(self, work: Path, *, keep: bool) -> Run:
        """Return the run, which goes on with what an earlier process left in a folder.

        Args:
            keep: whether an unfinished run can go on.
        """
        how: dict = {"written": self.given.written, "work": work}
        common = self.texts, self.probes, self.options
        if self.kept is not None:
            return by_block.Blockwise(self.given.model, self.source, self.kept, *common, **how)
        return WholeModel(self.given.model, self.source, *common, self.settings, keep=keep, **how)

    def train(self, run: Run) -> dict:
        """Train the model, judge what came out, and return the record of it."""
        dense, before, after, facts = run.train()
        for name, mean in nats(dense).items():
            warn_of_guessing(mean, self.source.config.vocab_size, name)
        on_probes = run.probe_losses()
        is_trained = bool(facts.get("best_step", facts["tuned_parameters"]))  # block by block there are no steps
        worse = self._worse(on_probes)
        reason = why_not(before, after, worse, self.options.tolerance, is_trained=is_trained)
        facts = {**self.identity, **facts, "teacher_name": self.source.name}
        facts |= {"recovered": reason is None, "unchanged_because": reason, "held_out": gains(dense, before, after)}
        record = self.given.record
        facts |= {"earlier": record["recovery"]} if "recovery" in record else {}
        record = record | {"recovery": facts}
        if reason is None:
            record |= self._measured_again(on_probes, facts)
            _describe(run.model.config, self.texts, record)
        else:
            log.warning(
                "NOTHING WAS RECOVERED, the model is what went in: %s; train on other text, more tokens, "
                "or with a smaller lr",
                reason,
            )
        return record

    def _worse(self, on_probes: ProbeLosses | None) -> dict[str, float]:
        measured = self.given.record.get("probe_texts")
        if not (self.probes and measured and on_probes):
            return {}
        return worse_kinds(self.probes, measured["kinds"], on_probes, self.options.tolerance)

    def _measured_again(self, on_probes: ProbeLosses | None, facts: dict) -> dict:
        """Return the probe texts of the record as they are after training; those before it go to its facts."""
        record = self.given.record
        if not (self.probes and on_probes):
            return {}
        facts["probe_texts_before"] = record["probe_texts"]
        sparsity, vocabulary = record["counts"]["sparsity"], self.source.config.vocab_size
        again = describe_probe_texts(self.probes, on_probes.dense, on_probes.after, sparsity, vocabulary)
        return {"probe_texts": again}

    def publish(self, run: Run, record: dict, output: Path, work: Path) -> None:
        """Write the checkpoint, or the adapter where the network still has one; an unchanged model is copied.

        Then remove the folder of the unfinished run.
        """
        recovered = record["recovery"]["recovered"]
        with creating(output) as unfinished:
            if not recovered and self.given.folder is not None:
                copy_folder(self.given.folder, unfinished)
            else:
                run.write(unfinished)
            if "plan" in record and not (recovered and self.settings.adapter):
                write_text(unfinished / "README.md", _card(run.model, record, output))
            # What was not compressed by rankfold has no record that `read_record` would take.
            write_json(unfinished / (NAME if "plan" in record else TRAINING), record)
            if (work / LOGS).exists():
                shutil.move(work / LOGS, unfinished / LOGS)
        (work / CONFIG).unlink()  # first: what a kill leaves of the rest is not gone on with
        shutil.rmtree(work)


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


def _describe(config, texts: dict[str, CalibrationData], record: dict) -> None:
    """Write into the config of a compressed model what it was trained on, and its probe texts."""
    if (description := described(config)) is None:
        return
    fields = description if isinstance(description, dict) else description.fields
    known = fields.get("trained_on", [])  # perplexity there is too good
    fields["trained_on"] = list(dict.fromkeys([*known, *(one.origin for one in texts.values())]))
    if "probe_texts_before" in record["recovery"]:
        fields["probe_texts"] = record["probe_texts"]


def _card(student: PreTrainedModel, record: dict, output: Path) -> str:
    auto = auto_class_name(student)
    return model_card(record, output.name, stock=described(student.config) is None, auto=auto)
