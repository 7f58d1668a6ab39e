"""Recover one block at a time, towards the dense model's: for models that do not fit with their optimiser.

    dense stream ------ dense block ------> states between attention and MLP, and after the block: the targets
    compressed stream - compressed block --> trained towards them; the best state on held-out text is kept

Both streams then move on, the compressed one through the trained block as it is written.

Shape legend: N sequences, T tokens, D model width.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from .._utils.files import read_json, read_tensors, write_json, write_text
from .._utils.memory import release_memory
from .._utils.progress import track
from .._utils.sizes import plural, size_text
from ..allocation import unique_parameters
from ..architectures import BlockView
from ..calibration.likelihood import losses_memory, token_losses
from ..calibration.observers import DenseBatch
from ..calibration.runner import Stream, advance, advance_dense, block_output, middle_output, start
from ..checkpoint.config import name_dtype
from ..checkpoint.load import described
from ..checkpoint.shards import Shards, write_around
from ..data.calibration_data import CalibrationData
from ..data.probes import Probes
from ..errors import OptionError, UnsupportedModelError, option
from ..methods import BLOCK
from ..models.block_reader import BlockReader
from ..models.dense_model import DenseModel
from ..models.weights import as_written
from ..modules import CODE_FILE, FORMAT, ShortcutBlock, code, tied_weights
from .judging import Losses, ProbeLosses, check_losses
from .memory import storages
from .options import Options
from .rate import rate_by_size
from .training import AT_ONCE, Clock, warm_up
from .tuning import Tune, mask_of_zeros, own_weights, round_weights

log = logging.getLogger(__name__)

EPOCHS = 4  # over the sequences, where the texts hold enough of them
RELATIVE_RATES: dict[Tune, float] = {"all": 1.5e-3, "norms": 3.5e-3}  # learning rates, over the size of the weights
# In fp32, added up for each weight of a block:
WEIGHT_BYTES = 4  # itself
TRAINED_BYTES = 4  # as it was, of one that is trained
AT_ONCE_BYTES = 16  # gradient, two moments of Adam and its best state, of one that is trained at once with others


class Half(NamedTuple):
    """What of a block is trained together, and where it is compared with the dense model."""

    name: str
    run: Callable[[BlockView, Stream, int], Tensor]
    target: Callable[[DenseBatch], Tensor]
    weights: list[nn.Parameter]


class Sides(NamedTuple):
    """The same sequences in both models."""

    dense: Stream
    compressed: Stream


def kept_of(student: DenseModel, teacher: DenseModel, record: dict) -> list[int]:
    """Return the block of the dense model from which every block of the compressed one was made.

    Raises:
        UnsupportedModelError: blocks write their stream in other coordinates than the dense model's, or share weights.
        OptionError: blocks were removed, and no record tells which; or the dense model is another one.
    """
    whole = f"leave {option('blockwise')} out"
    dense = f"give the dense model that it was compressed from, or {whole}"
    if (width := student.config.hidden_size) != teacher.config.hidden_size:
        raise OptionError(
            f"states of the model have a width of {width} and those of the dense one {teacher.config.hidden_size}; "
            f"{dense}"
        )
    if any(isinstance(block, ShortcutBlock) for block in student.blocks):
        raise UnsupportedModelError(
            f"blocks of {student.name} write their states in coordinates of their own, which no dense block does, so "
            f"there is nothing to train a single block towards; {whole}"
        )
    if tied_weights(student.model):
        raise UnsupportedModelError(
            f"blocks of {student.name} share bases, so none of them can be trained by itself; {whole}"
        )
    removed = {m["block"] for m in record.get("plan", {}).get("modules", ()) if (m["module"], m["rank"]) == (BLOCK, 0)}
    kept = [block for block in range(len(teacher)) if block not in removed]
    if len(kept) != len(student):
        raise OptionError(
            f"the model has {plural(len(student), 'block')} where {len(kept)} of the dense model are left by its "
            f"record; {dense}"
        )
    return kept


class Blockwise:
    """One recovery block by block.

    Args:
        student: compressed model in fp32, whose blocks are read one at a time.
        teacher: dense model.
        kept: of :func:`kept_of`.
        texts: name -> sequences to train on, and held-out ones.
        probes: probe texts; ``None``: they are not followed.
        options: of them ``tokens`` are those that every block is trained on.
        written: dtype in which weights are written.
        work: folder of the unfinished run.
    """

    network = None  # it need not fit in memory

    def __init__(
        self,
        student: DenseModel,
        teacher: DenseModel,
        kept: list[int],
        texts: dict[str, CalibrationData],
        probes: Probes | None,
        options: Options,
        *,
        written: torch.dtype,
        work: Path,
    ):
        self.clock = Clock(work)
        self.student, self.teacher, self.kept, self.options = student, teacher, kept, options
        self.written, self.work = written, work
        held_out: dict[str, Any] = {name: one.held_out for name, one in texts.items()}
        self.counts = {name: len(some) for name, some in held_out.items()}
        self.unseen, self.probes = torch.cat(list(held_out.values())), probes and probes.ids
        every: list[Any] = [one.ids for one in texts.values()]
        ids = torch.cat(every)
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(options.seed))
        self.ids = ids[order]  # so that a batch is a mixture
        self.at_once = max(ids.shape[1], min(options.batch_tokens, AT_ONCE))
        self.batches = max(1, options.batch_tokens // self.at_once)  # of a step
        self.epochs = max(1, round(options.tokens / ids.numel()))
        self.shards = Shards(work, len(student))

    @property
    def model(self) -> PreTrainedModel:
        """The model whose config is written."""
        return self.student.model

    @property
    def memory_bytes(self) -> int:
        """Estimate the peak in bytes, of tensors: what surrounds the blocks, streams, and two blocks and
        the optimiser or, in the end, the logits of held-out text."""
        training = max(map(self._training_bytes, self.student.meta_blocks()))
        dense = max(map(unique_parameters, self.teacher.blocks)) * self.teacher.compute_dtype.itemsize
        outer = [t for m in (self.student, self.teacher) for t in m.model.state_dict().values()]
        around = sum(storages(outer).values())  # a tied head once
        view = self.teacher.meta_block(0)
        width, item = view.width, (self.student.autocast or torch.float32).itemsize
        probes = 0 if self.probes is None else self.probes.numel()
        # In the dense model also between attention and MLP; of held-out text before training, too.
        streams = (3 * self.ids.numel() + 4 * self.unseen.numel() + 3 * probes) * width * item
        hidden = view.hidden
        halves = (16 * width, 6 * width + 6 * hidden)  # activations of a batch, kept for the backward pass
        passing = 4 * self.at_once * (sum(halves) if view.middle is None else max(halves))
        return around + streams + max(training + 2 * dense + passing, losses_memory(self.teacher, self.at_once))

    def _training_bytes(self, view: BlockView) -> int:
        """Return what a block takes with the optimiser of the half that is trained at once."""
        attention = view.attention.module
        whole, one = (_count(own_weights(part, self.options.tune)) for part in (view.module, attention))
        at_once = whole if view.middle is None else max(one, whole - one)
        return WEIGHT_BYTES * unique_parameters(view.module) + TRAINED_BYTES * whole + AT_ONCE_BYTES * at_once

    def train(self) -> tuple[Losses, Losses, Losses, dict[str, Any]]:
        """Train every block; those that an earlier run has finished are read back.

        Returns:
            Losses on held-out text of the dense model, of the compressed one, and of the trained one as it is written;
            and what happened.
        """
        log.info(
            "block by block: %s, each trained on %s in %s; memory about %s in addition to the program",
            plural(len(self.student), "block"),
            plural(self.epochs * self.ids.numel(), "token"),
            plural(self.epochs, "epoch"),
            size_text(self.memory_bytes),
        )
        every = [ids for ids in (self.ids, self.unseen, self.probes) if ids is not None]
        self.sides = [Sides(self._start(self.teacher, ids), self._start(self.student, ids)) for ids in every]
        self.untrained = [side.compressed.copy() for side in self.sides[1:]]
        reports, read = {}, BlockReader(self.teacher)
        ends = [*self.kept[1:], len(self.teacher)]
        for place in track(range(len(self.student)), "recovering", note=lambda: _note(reports)):
            targets = self._targets(read, range(ends[place - 1] if place else 0, ends[place]), self.kept[place])
            view = self.student.block(place)
            for stream in self.untrained:
                advance(view, stream)
            reports[place] = self._trained(view, *targets)
            for side in self.sides:
                advance(view, side.compressed)
            del view, targets
            release_memory()
        tuned = sum(report["weights"] for report in reports.values())
        facts = {
            "tokens_seen": self.epochs * self.ids.numel(),
            "tuned_parameters": tuned,
            "epochs": self.epochs,
            "blocks": {str(place): report for place, report in reports.items()},
        }
        unseen = self.sides[1]
        streams = ((self.teacher, unseen.dense), (self.student, self.untrained[0]), (self.student, unseen.compressed))
        dense, before, after = (self._losses(*pair) for pair in streams)
        check_losses(dense=dense, compressed=before)
        return dense, before, after, facts

    def _targets(self, read: BlockReader, blocks: range, own: int) -> list[list[DenseBatch]]:
        """Move the dense streams through some blocks; return what one of the compressed model is compared with.

        Args:
            own: the block that it was made from; those after it were removed, so it stands for them, too.

        Returns:
            Of the sequences to train on, and of those held out: the states inside that block, and after the last one.
        """
        found: list[list[DenseBatch]] = []
        for index in blocks:
            view = read(index)
            last: list[list[DenseBatch]] = [[], []]
            for side, kept in zip(self.sides[:2], last, strict=True):
                advance_dense(view, side.dense, kept.append)
            for side in self.sides[2:]:
                advance(view, side.dense)
            if index <= own:
                found = last
            else:
                pairs = (zip(*both, strict=True) for both in zip(found, last, strict=True))
                found = [[one._replace(output=end.output) for one, end in some] for some in pairs]
        return found

    def probe_losses(self) -> ProbeLosses | None:
        """Return the losses on the probe texts once it is trained; ``None`` where there are none."""
        if self.probes is None:
            return None
        dense, compressed = self.sides[2]
        streams = ((self.teacher, dense), (self.student, self.untrained[1]), (self.student, compressed))
        return ProbeLosses(*(token_losses(source, self.probes, stream) for source, stream in streams))

    def cast(self) -> None:
        """Have the config name the dtype in which weights are written."""
        name_dtype(self.model.config, self.written)

    def write(self, folder: Path) -> None:
        """Write the checkpoint, without its record and card, into a new folder."""
        folder.mkdir()
        shards = Shards(folder, len(self.student))
        for place in range(len(self.student)):
            shards.write(place, self._kept(place))
        outer = {name: as_written(name, tensor, self.written) for name, tensor in self.student.outer_state().items()}
        shards.finish(outer)
        config: Any = self.model.config
        description: Any = described(config)
        if description is not None:
            description.fields["format"] = FORMAT
            write_text(folder / CODE_FILE, code())
        write_around(folder, self.student, config)

    def _kept(self, place: int) -> dict[str, Tensor]:
        """Return what is written of a block."""
        return read_tensors(self.shards.path(place), self.work)

    def _start(self, source: DenseModel, ids: Tensor) -> Stream:
        return start(source, ids, autocast=source.autocast, most=self.at_once)

    def _losses(self, source: DenseModel, stream: Stream) -> Losses:
        losses = iter(token_losses(source, self.unseen, stream))
        return {name: [next(losses) for _ in range(count)] for name, count in self.counts.items()}

    def _trained(self, view: BlockView, targets: list[DenseBatch], unseen: list[DenseBatch]) -> dict[str, Any]:
        """Train a block in place, round it and make it durable, or read what an earlier run has made of it.

        Returns:
            Its error on held-out text before and after, what was trained in which order, and how many weights.
        """
        report = self.work / f"block-{view.index:05d}.json"
        for parameter in view.module.parameters():
            parameter.data = parameter.data.clone()  # what is read may lie in the file
        prefix = f"{self.student.architecture.path_of(view.index)}."
        if report.exists():  # written after the shard
            state = {name.removeprefix(prefix): tensor for name, tensor in self._kept(view.index).items()}
            view.module.load_state_dict(state)
            return read_json(report, self.work)
        found = self._train(view, targets, unseen)
        state = view.module.state_dict()
        self.shards.write(
            view.index, {prefix + name: as_written(name, tensor, self.written) for name, tensor in state.items()}
        )
        write_json(report, found)
        self.clock.save()
        return found

    def _train(self, view: BlockView, targets: list[DenseBatch], unseen: list[DenseBatch]) -> dict[str, Any]:
        view.module.requires_grad_(False)
        weights = list(own_weights(view.module, self.options.tune))
        held_out, masks = self.sides[1].compressed, mask_of_zeros(view.module)
        closed_form = _copies(weights)
        halves = _halves(view, self.sides[0].compressed, weights)
        whole = Half("block", block_output, lambda batch: batch.output, weights)
        before = self._errors(whole, view, held_out, unseen)
        for half in halves if before.any() else ():  # nothing is nearer than a block that was left as it was
            self._fit(half, view, targets, unseen, masks)
        round_weights(view.module, self.written, self.options.seed + view.index)
        after = self._errors(whole, view, held_out, unseen)
        is_better = _is_better(after, before, before)
        if not is_better:
            _put(weights, closed_form)
        names = list(self.counts)
        return {
            "trained": [half.name for half in halves] if is_better else [],
            "weights": sum(weight.numel() for weight in weights) if is_better else 0,
            "error_before": dict(zip(names, before.tolist(), strict=True)),
            "error": dict(zip(names, (after if is_better else before).tolist(), strict=True)),
        }

    def _fit(
        self, half: Half, view: BlockView, targets: list[DenseBatch], unseen: list[DenseBatch], masks: dict[str, Tensor]
    ) -> None:
        """Train some weights of a block, and leave those with which held-out text was nearest to the dense model's."""
        stream, held_out = (side.compressed for side in self.sides[:2])
        steps = self.epochs * -(-len(targets) // self.batches)
        for weight in half.weights:
            weight.requires_grad_(True)
        lr = self.options.lr or rate_by_size(RELATIVE_RATES[self.options.tune], half.weights)
        optimiser = torch.optim.AdamW(half.weights, lr, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimiser, warm_up(steps), steps)
        generator = torch.Generator().manual_seed(self.options.seed + view.index)
        first = best = self._errors(half, view, held_out, unseen)
        if not first.any():
            return
        kept = _copies(half.weights)
        masked = [(view.module.get_parameter(name), mask) for name, mask in masks.items()]
        scale = (
            _mean_square(half, targets) * best.mean().item()
        )  # so that the loss begins near 1, whatever the states' size
        for _ in range(self.epochs):
            for some in torch.randperm(len(targets), generator=generator).split(self.batches):
                for i in some.tolist():
                    gap = half.run(view, stream, i).float() - half.target(targets[i]).float()
                    (gap.square().mean() / (scale * len(some))).backward()
                optimiser.step()
                schedule.step()
                optimiser.zero_grad()
                for parameter, mask in masked:
                    parameter.data.mul_(mask)
            found = self._errors(half, view, held_out, unseen)
            if _is_better(found, best, first):
                best = found
                for copy, weight in zip(kept, half.weights, strict=True):
                    copy.copy_(weight.detach())
        _put(half.weights, kept)
        for weight in half.weights:
            weight.requires_grad_(False)

    @torch.no_grad()
    def _errors(self, half: Half, view: BlockView, stream: Stream, targets: list[DenseBatch]) -> Tensor:
        """Return the relative squared error of every text, ``(texts,)``, in fp64 on the CPU."""
        gaps, sizes = [], []
        for i, batch in enumerate(targets):
            target = half.target(batch).float()
            gaps.append((half.run(view, stream, i).float() - target).square().sum((1, 2)).cpu().double())
            sizes.append(target.square().sum((1, 2)).cpu().double())
        parts = (torch.cat(rows).split(list(self.counts.values())) for rows in (gaps, sizes))
        return torch.stack([gap.sum() / size.sum() for gap, size in zip(*parts, strict=True)])


def _halves(view: BlockView, stream: Stream, weights: list[nn.Parameter]) -> list[Half]:
    """Return attention, then MLP; the block as a whole where no place lies between the two."""

    def after(batch: DenseBatch) -> Tensor:
        return batch.output

    if view.middle is None:
        return [Half("block", block_output, after, weights)]
    for weight in weights:
        weight.requires_grad_(True)
    middle = middle_output(view, stream, 0)
    reached = (
        torch.autograd.grad(middle.sum(), weights, allow_unused=True) if middle.requires_grad else [None] * len(weights)
    )
    for weight in weights:
        weight.requires_grad_(False)
    pairs = list(zip(weights, reached, strict=True))
    attention, rest = ([w for w, g in pairs if (g is None) is later] for later in (False, True))
    found = [
        Half("attention", middle_output, lambda batch: batch.middle, attention),
        Half("mlp", block_output, after, rest),
    ]
    return [half for half in found if half.weights]


def _is_better(found: Tensor, best: Tensor, first: Tensor) -> bool:
    """Tell whether errors are less than the best so far on the average of the texts, and on none more than at first."""
    return bool(found.mean() < best.mean() and (found <= first).all())  # a NaN is not


def _mean_square(half: Half, targets: list[DenseBatch]) -> float:
    return torch.stack([half.target(batch).float().square().mean() for batch in targets]).mean().item()


def _count(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


def _copies(weights: list[nn.Parameter]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def _put(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data = value


def _note(reports: dict[int, dict[str, Any]]) -> str:
    """Return the mean held-out error of the last block before and after training, as a phrase."""
    if not reports:
        return ""
    place = max(reports)
    before, after = (sum(reports[place][key].values()) / len(reports[place][key]) for key in ("error_before", "error"))
    return f"held-out error of block {place} {before:.3g} -> {after:.3g}"
