"""Train a compressed model to predict what the dense one predicts, by transformers' Trainer.

Shape legend: N sequences, T tokens.
"""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from .._utils.files import read_json, sync_files, write_json, writing
from .._utils.processes import from_first, gather, is_first, on_first, process_count, together
from .._utils.progress import track
from .._utils.sizes import plural
from ..errors import CheckpointError, OptionError, option
from ..models.devices import autocast_dtype
from .loss import Head, Loss, hidden_states, training_loss

log = logging.getLogger(__name__)

DONE = "rankfold.done"  # in a checkpoint of Trainer that is whole
SECONDS = "seconds.json"
WARM_UP = 0.05  # fraction of all steps
LEAST_WARM_UP = 3  # steps, of a run that has twice as many: AdamW knows little of the gradients before
AT_ONCE = 2048  # tokens of a forward and backward pass
_CHECKPOINTING = "activation_checkpointing"  # as transformers calls it from 5.23 on
if _CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    _CHECKPOINTING = "gradient_checkpointing"


class Distiller(Trainer):
    """Trainer whose loss compares with the dense model, some positions at a time.

    Args:
        base: the compressed model.
        teacher: the dense model; of one whose states come with the sequences the head is enough.
    """

    def __init__(self, *args, base: PreTrainedModel, teacher: PreTrainedModel | None, loss: Loss, **kwargs):
        super().__init__(*args, **kwargs)
        self.student = Head(base)
        self.loss: Loss = loss
        self.teacher = Head(teacher) if teacher is not None else None
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # so that accumulated steps are averaged here

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of one batch; see :func:`.loss.training_loss`.

        The processes of a run fail and stop together: alone, one would leave the others waiting for its gradients. A
        forward of the compressed model may begin with an exchange of DDP, so they agree before it, too.
        """
        ids = inputs["input_ids"]
        # Not by accelerate, which sets the precision of the trained model alone, and leaves it so when that is scored.
        precision = training_context(ids.device)
        with together(), precision:
            dense = self._dense_states(inputs)
        with together(), precision:
            compressed = hidden_states(model, self.student.decoder, ids)
            found = training_loss(self.student, compressed, ids, loss=self.loss, teacher=self.teacher, dense=dense)
        if not all(gather(bool(found.isfinite()))):
            log.warning("the loss is not finite, so training stops; the best state before it is kept")
            self.control.should_training_stop = True
        return found

    @torch.no_grad()
    def _dense_states(self, inputs: dict[str, Tensor]) -> Tensor | None:
        if self.teacher is None or self.loss == "next-token" or "dense" in inputs:
            return inputs.get("dense")
        return hidden_states(self.teacher.model, self.teacher.decoder, inputs["input_ids"])

    def _save_checkpoint(self, model, trial) -> None:
        with writing(Path(str(self.args.output_dir))):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Leave the folder of the run to the first process; training draws no numbers."""
        if is_first():
            super()._save_rng_state(output_dir)


class KeepZeros(TrainerCallback):
    """Set weights that were zero on purpose to zero again after every step.

    Args:
        masks: name of a parameter -> where it is not zero.
    """

    def __init__(self, model: nn.Module, masks: dict[str, Tensor]):
        parameters = dict(model.named_parameters())
        self.masked = [(parameters[name], mask) for name, mask in masks.items()]

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        for parameter, mask in self.masked:
            parameter.mul_(mask.to(parameter.device))


class Progress(TrainerCallback):
    """Show how far training is, as other commands do; the note is the last score."""

    def __init__(self, note: Callable[[], str]):
        self.note, self.steps = note, iter(())

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.steps = iter(track(range(state.global_step, state.max_steps), "recovering", note=self.note))
        next(self.steps, None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        next(self.steps, None)


class Clock(TrainerCallback):
    """Count the seconds of a run, and of those before it that were killed, up to the last state that each has saved.

    Args:
        work: folder of the unfinished run.
    """

    def __init__(self, work: Path):
        self.path = work / SECONDS
        before = from_first(lambda: read_json(self.path, work)["seconds"] if self.path.exists() else 0.0)
        self.begin = time.monotonic() - before

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.begin

    def save(self) -> None:
        """Leave the seconds so far to the next run."""
        on_first(lambda: write_json(self.path, {"seconds": self.seconds}))

    def on_save(self, args, state, control, **kwargs) -> None:
        self.save()


class KeepWhole(TrainerCallback):
    """Mark a checkpoint once everything in it is on the disk, so that a run goes on from a whole one after a kill or a
    loss of power. Those before it go then, so there are two for a moment, and one otherwise.
    """

    def on_save(self, args, state, control, **kwargs) -> None:
        folder = Path(str(args.output_dir))

        def keep() -> None:
            last = folder / f"checkpoint-{state.global_step}"
            with writing(last):
                sync_files(last)
            write_json(last / DONE, {path.name: path.stat().st_size for path in last.iterdir()})
            for other in folder.glob("checkpoint-*"):
                if other != last:
                    shutil.rmtree(other)

        on_first(keep)


def recomputes(args: TrainingArguments) -> bool:
    """Tell whether activations inside a block are computed again in the backward pass."""
    return getattr(args, _CHECKPOINTING)


@contextlib.contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Take back what Trainer sets in a model: it turns its cache off, and has it compute activations twice for good."""
    config = dict(vars(model.config))
    try:
        yield
    finally:
        vars(model.config).clear()
        vars(model.config).update(config)
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            getattr(model, f"{_CHECKPOINTING}_disable")()
            model.disable_input_require_grads()


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest whole checkpoint in a folder of Trainer; ``None`` where there is none.

    Raises:
        CheckpointError: a file of it is missing, or shorter than what was written.
    """
    whole = {int(mark.parent.name.rpartition("-")[2]): mark.parent for mark in folder.glob(f"checkpoint-*/{DONE}")}
    if not whole:
        return None
    last = whole[max(whole)]
    for name, size in read_json(last / DONE, last).items():
        if not (last / name).exists() or (last / name).stat().st_size != size:
            raise CheckpointError(
                f"{last / name} is missing or damaged; remove {last}, and the same command trains from the beginning"
            )
    return str(last)


def trains_in_bf16(device: torch.device) -> bool:
    """Tell whether autocast in bf16 is faster there than fp32."""
    if device.type == "cpu":
        return autocast_dtype(device) is not None
    return getattr(torch.get_device_module(device), "is_bf16_supported", bool)()


def training_context(device: torch.device) -> torch.autocast:
    """Return the precision in which a forward of a training runs there."""
    return torch.autocast(device.type, torch.bfloat16, enabled=trains_in_bf16(device))


def warm_up(steps: int) -> int:
    """Return the steps over which the learning rate rises, of so many; the first of them has a learning rate of 0."""
    return min(steps // 2, max(LEAST_WARM_UP, round(WARM_UP * steps)))


def reaches_all(network: nn.Module, decoder: nn.Module) -> bool:
    """Return whether a single token gives every trained weight a gradient, so that any text does.

    It does not in a model whose images have a part of their own.

    Args:
        network, decoder: see :func:`.loss.hidden_states`.
    """
    trained = [p for p in network.parameters() if p.requires_grad]
    token = torch.zeros(1, 1, dtype=torch.long, device=trained[0].device)
    hidden_states(network, decoder, token).sum().backward()
    found = all(p.grad is not None for p in trained)
    network.zero_grad()
    return found


def sequences_of_step(batch_tokens: int, length: int) -> int:
    """Return the sequences of a step, of all processes of a run together; each takes as many.

    Args:
        batch_tokens: tokens of a step, at most.
        length: tokens of a sequence.

    Raises:
        OptionError: the processes cannot share them evenly.
    """
    found, count = max(1, batch_tokens // length), process_count()
    if found % count:
        allowed = [n * count * length for n in (found // count, found // count + 1) if n]
        raise OptionError(
            f"{option('batch_tokens', batch_tokens)} is a step of {plural(found, 'sequence')} of {length} tokens, "
            f"which {count} processes cannot share evenly; give "
            f"{' or '.join(option('batch_tokens', n) for n in allowed)}"
        )
    return found


def sequences_seen(steps: int, count: int, batch: int) -> int:
    """Return how many sequences so many steps train on: the last step of an epoch has those that are left.

    Those that processes repeat to share that step evenly are not counted.

    Args:
        steps: of the optimiser.
        count: sequences there are.
        batch: sequences of a step.
    """
    epochs, more = divmod(steps, math.ceil(count / batch))
    return epochs * count + min(more * batch, count)


def arguments(
    folder: Path,
    *,
    steps: int,
    batch: int,
    length: int,
    every: int,
    device: torch.device,
    keep: bool,
    checkpointing: bool = False,
    **others,
) -> TrainingArguments:
    """Return the settings of a run.

    Args:
        folder: of the unfinished run.
        steps: of the optimiser.
        batch: sequences of a step, which the processes of a run share.
        length: tokens of a sequence.
        every: steps between two checkpoints.
        keep: whether checkpoints are written at all.
        checkpointing: compute activations again in the backward pass.
        others: of TrainingArguments.
    """
    own = batch // process_count()
    at_once = next(n for n in range(min(own, max(1, AT_ONCE // length)), 0, -1) if own % n == 0)
    others |= {_CHECKPOINTING: True} if checkpointing else {}
    found = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=own // at_once,
        lr_scheduler_type="cosine",
        warmup_steps=warm_up(steps),
        weight_decay=0.0,
        use_cpu=device.type == "cpu",
        save_strategy="steps" if keep else "no",
        save_steps=every,
        logging_steps=every,
        remove_unused_columns=False,
        disable_tqdm=True,
        **others,
    )
    found._n_gpu = min(found.n_gpu, 1)  # or Trainer gives every GPU that it sees a batch of this size, by DataParallel
    return found
