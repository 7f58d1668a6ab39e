"""Recover a whole model in memory, by transformers' Trainer, towards the predictions of the dense model.

Shape legend: N sequences, T tokens.
"""

import functools
import itertools
import json
import logging
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from .._utils.evaluating import evaluating
from .._utils.files import read_json, write_json
from .._utils.present import present
from .._utils.processes import from_first, gather, on_first, outside_exchanges
from .._utils.sizes import plural, size_text
from ..checkpoint.config import name_dtype
from ..checkpoint.shards import write_processors
from ..data.batches import digest_of
from ..data.calibration_data import CalibrationData
from ..data.probes import Probes
from ..errors import CheckpointError, option
from ..models.dense_model import DenseModel
from .cached import CachedStates
from .judging import Judge, Losses, ProbeLosses, check_losses, nats, score, token_losses
from .loss import Head
from .memory import trained_weights, training_disk, training_memory
from .options import Options, Settings
from .rate import measured_rate
from .training import (
    AT_ONCE,
    Clock,
    Distiller,
    KeepWhole,
    KeepZeros,
    Progress,
    arguments,
    last_checkpoint,
    left_as_it_was,
    reaches_all,
    recomputes,
    sequences_of_step,
    sequences_seen,
    trains_in_bf16,
)
from .tuning import mask_of_zeros, prepared, round_weights, without_dropout

log = logging.getLogger(__name__)

STEPS, RATE = "steps.json", "rate.json"
HELD_OUT, PROBES = "held out: ", "probe texts"  # what losses are of, in a cache
SCORES = 10  # times that held-out text is scored during a run, at most
SCORING = 0.2  # of the minutes given, at most


class WholeModel:
    """One recovery of a model in memory.

    Args:
        student: compressed model in fp32.
        source: dense model.
        texts: name -> sequences to train on, and held-out ones.
        probes: probe texts; ``None``: they are not measured.
        written: dtype in which weights are written.
        work: folder of the unfinished run.
        keep: whether an unfinished run can go on.

    Attributes:
        network: the model, with adapters around it while it has any.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        source: DenseModel,
        texts: dict[str, CalibrationData],
        probes: Probes | None,
        options: Options,
        settings: Settings,
        *,
        written: torch.dtype,
        work: Path,
        keep: bool,
    ):
        self.clock = Clock(work)
        self.student, self.source, self.options, self.settings = student, source, options, settings
        self.probes, self.written, self.work, self.keep = probes, written, work, keep
        self.network: Any = student
        self.held_out: dict[str, Any] = {name: one.held_out for name, one in texts.items()}
        every: list[Any] = [one.ids for one in texts.values()]
        self.ids = torch.cat(every)  # (N, T)
        self.batch = sequences_of_step(options.batch_tokens, self.ids.shape[1])
        self.cache = self._cached(texts) if settings.cache_logits else None
        self.dense: Any = source.model if self.cache else source.whole_model()  # of a cached one the head is enough

    def _cached(self, texts: dict[str, CalibrationData]) -> CachedStates:
        """Fill or read the cache of the dense model's predictions."""
        scored = {f"{HELD_OUT}{name}": ids for name, ids in self.held_out.items()}
        scored |= {PROBES: self.probes.ids} if self.probes else {}
        identity = {
            "teacher": self.source.fingerprint,
            "texts": {name: one.describe() for name, one in texts.items()},
            "scored": {name: digest_of(ids) for name, ids in scored.items()},
            "bf16": trains_in_bf16(self.student.device),
        }
        folder = Path(present(self.settings.cache_logits))
        return CachedStates(folder, self.source, self.ids, scored, json.loads(json.dumps(identity)))

    @property
    def model(self) -> PreTrainedModel:
        """The model whose config is written."""
        return self.student

    def train(self) -> tuple[Losses, Losses, Losses, dict[str, Any]]:
        """Train the model, and leave it with the best weights, rounded as they will be written.

        Returns:
            Losses on held-out text of the dense, the compressed and the trained model; and what happened.
        """
        settings, cached = self.settings, self.cache.losses if self.cache else None
        of_dense = (
            {name: cached[f"{HELD_OUT}{name}"] for name in self.held_out}
            if cached
            else score(self.dense, Head(self.dense), self.held_out)
        )
        scored = time.monotonic()
        before = score(self.student, Head(self.student), self.held_out)
        scoring = max(gather(time.monotonic() - scored))  # seconds
        check_losses(dense=of_dense, compressed=before)
        self.probes_before = self._on_probes()
        seconds = None if settings.minutes is None else (60 * settings.minutes, scoring)
        facts = self._train(nats(before), seconds)
        if not settings.adapter and self.network is not self.student:
            self.network = self.student = self.network.merge_and_unload()
        if not settings.adapter:
            self.student.requires_grad_(True)  # as of any loaded model
        round_weights(self.student, self.written, self.options.seed)
        return of_dense, before, score(self.network, Head(self.student), self.held_out), facts

    def _train(self, before: dict[str, float], seconds: tuple[float, float] | None) -> dict[str, Any]:
        """Give the network its best weights, adapters around it, and return what happened.

        Args:
            before: text -> nats per token of the student.
            seconds: there are, and that scoring once takes; ``None``: as many tokens as the options say.
        """
        student, options, work, ids = self.student, self.options, self.work, self.ids
        masks = mask_of_zeros(student)
        self.network = network = prepared(student, options.tune, options.rank, options.seed)
        batch = self.batch
        judge = Judge(network, student, self.held_out, before, work, options.tolerance)
        callbacks = [
            judge,
            Progress(judge.note),
            self.clock,
            KeepWhole(),
            *([KeepZeros(network, masks)] if masks else []),
        ]
        steps = max(1, round(options.tokens / (batch * ids.shape[1])))
        make = functools.partial(
            Distiller,
            network,
            train_dataset=self.cache or [{"input_ids": sequence} for sequence in ids],
            callbacks=callbacks,
            base=student,
            teacher=self.dense,
            loss=options.loss,
        )
        common: dict = {"seed": options.seed, "device": student.device, "keep": self.keep}
        common |= {"report_to": self.settings.report_to}
        common["ddp_find_unused_parameters"] = not reaches_all(network, student.get_decoder())
        common["checkpointing"] = self.settings.gradient_checkpointing
        args = functools.partial(arguments, work, batch=batch, length=ids.shape[1], **common)
        with without_dropout(student), left_as_it_was(student), evaluating(self.dense):
            trial = functools.cache(lambda: make(args(steps=1, every=1)))  # where a rate or a time is to be measured
            lr = options.lr or self._measured_rate(trial())
            args = functools.partial(args, learning_rate=lr)
            scores = SCORES
            if seconds is not None:
                scores, most = _fitting(*seconds, work, network, trial())
                steps = min(steps, most)
            judge.every = math.ceil(steps / scores)
            settled = args(steps=steps, every=judge.every)
            trained, memory = self._announced(settled)
            trainer = make(settled)
            checkpoint = from_first(lambda: last_checkpoint(work))
            with outside_exchanges():
                trainer.train(resume_from_checkpoint=checkpoint)
        judge.restore_best()
        asked = {} if seconds is None else {"tokens": steps * batch * ids.shape[1]}  # for as many steps again
        return {
            **asked,
            "lr": lr,
            "steps": trainer.state.global_step,
            "tokens_seen": sequences_seen(trainer.state.global_step, len(ids), batch) * ids.shape[1],
            "tuned_parameters": trained,
            "estimated": {"peak_memory_bytes": memory},
            "best_step": judge.best["step"],
            "history": judge.history,
        }

    def _measured_rate(self, trial: Distiller) -> float:
        """Return the learning rate that suits what is trained; a killed run goes on with the one it began with."""
        path = self.work / RATE
        if not from_first(path.exists):
            rows = torch.linspace(0, len(self.ids) - 1, max(1, AT_ONCE // self.ids.shape[1])).long().unique().tolist()
            dataset: Any = trial.train_dataset
            unseen = torch.cat([ids[:2] for ids in self.held_out.values()])
            # Recomputed activations are those of Trainer's own loop; as few are kept by as many tokens fewer.
            blocks = self.student.config.get_text_config().num_hidden_layers if recomputes(trial.args) else 1
            tokens = max(2, self.ids.shape[1] // blocks)

            def backward() -> None:
                for row in rows:
                    batch = trial._prepare_inputs(trial.data_collator([dataset[row]]))
                    some = {name: tensor[:, :tokens] for name, tensor in batch.items()}
                    trial.compute_loss(self.network, some).backward()

            found = measured_rate(
                self.network,
                self.options.tune,
                backward,
                lambda: torch.cat(token_losses(self.network, Head(self.student), unseen)),
            )
            on_first(lambda: write_json(path, {"lr": found}))
        return from_first(lambda: read_json(path, path.parent))["lr"]

    def _announced(self, args: TrainingArguments) -> tuple[int, int]:
        """Say what is trained, for how long and in how much memory; return how many weights, and the bytes.

        Raises:
            CheckpointError: the disk has no room for the best state, and for what lets a killed run go on.
        """
        trained = trained_weights(self.network)
        memory = training_memory(
            self.network,
            self.student,
            [self.dense, self.source.model],
            self.ids[:1].to(self.student.device),
            self.options.loss,
            args,
        )
        disk = training_disk(self.network, self.student, keep=self.keep)
        if from_first(lambda: last_checkpoint(self.work)) is None and from_first(self._free) < disk:
            raise CheckpointError(
                f"training takes {size_text(disk)} on the disk, in {self.work}, and "
                f"{size_text(from_first(self._free))} are free; free space, choose another folder, or give "
                f"{option('tune', 'lora')}"
            )
        log.info(
            "training %s, %s of %s, learning rate %g; memory about %s in addition to the program, %s on the disk until "
            "it is done",
            plural(trained, "weight"),
            plural(args.max_steps, "step"),
            plural(min(self.batch, len(self.ids)) * self.ids.shape[1], "token"),
            args.learning_rate,
            size_text(memory),
            size_text(disk),
        )
        return trained, memory

    def _free(self) -> int:
        return shutil.disk_usage(self.work).free

    def probe_losses(self) -> ProbeLosses | None:
        """Return the losses on the probe texts once it is trained; ``None`` where there are none."""
        if self.probes is None:
            return None
        dense, ids = self.dense, self.probes.ids
        of_dense = self.cache.losses[PROBES] if self.cache else token_losses(dense, Head(dense), ids)
        return ProbeLosses(of_dense, self.probes_before, self._on_probes())

    def _on_probes(self) -> list[Tensor]:
        return token_losses(self.network, Head(self.student), self.probes.ids) if self.probes else []

    def give_back(self, student: PreTrainedModel) -> None:
        """Take what went in, in place of what was trained."""
        self.network = self.student = student
        self.settings = replace(self.settings, adapter=False)

    def cast(self) -> None:
        """Hold the weights in the dtype in which they are written."""
        for parameter in self.student.parameters():
            parameter.data = parameter.data.to(self.written) if parameter.is_floating_point() else parameter.data
        name_dtype(self.student.config, self.written)
        self.network.eval()

    def write(self, folder: Path) -> None:
        """Write the checkpoint, without its record and card, or the adapter, into a new folder."""
        folder.mkdir()
        self.network.save_pretrained(folder)
        if not self.settings.adapter:
            write_processors(folder, self.source)


def _fitting(seconds: float, scoring: float, work: Path, network: nn.Module, trial: Distiller) -> tuple[int, int]:
    """Return how often to score, and how many steps take about the rest of so many seconds.

    Both are written down, so that a killed run goes on with as many. The slowest of several processes decides, without
    the time in which they exchange gradients.
    """
    path = work / STEPS
    if not from_first(path.exists):
        scores = max(1, min(SCORES, int(SCORING * seconds / scoring)))
        begin, batches = time.monotonic(), trial.args.gradient_accumulation_steps
        for batch in itertools.islice(trial.get_train_dataloader(), batches):
            trial.compute_loss(network, batch).backward()
        network.zero_grad()
        left = seconds - (scores + 2) * scoring  # two before and after training
        found = {"scores": scores, "steps": max(1, int(left / max(gather(time.monotonic() - begin))))}
        on_first(lambda: write_json(path, found))
    found = from_first(lambda: read_json(path, path.parent))
    return found["scores"], found["steps"]
