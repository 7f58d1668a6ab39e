"""Whether training helps: held-out text scored before, during and after; the best state is kept.

Shape legend: N sequences, T tokens.
"""

import logging
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from .._utils.evaluating import evaluating
from .._utils.files import read_json, read_tensors, write_json, write_tensors
from .._utils.processes import broadcast, dealt, from_first, is_first, on_first, together
from ..calibration.likelihood import compare_losses, perplexity_of
from ..compression.held_out import CERTAIN
from ..data.probes import Probes
from ..errors import NumericsError
from .loss import POSITIONS, Head, hidden_states

log = logging.getLogger(__name__)

OTHER_TEXT = 0.25  # tolerance for text of kinds that were not asked for: to give up a little of them may be the purpose
HISTORY, BEST = "history.json", "best.safetensors"

Losses = dict[str, list[Tensor]]  # text -> of every held-out sequence the nats of its predicted tokens


class ProbeLosses(NamedTuple):
    """Losses of every probe text, of its padding too."""

    dense: list[Tensor]
    before: list[Tensor]  # of the compressed model before training
    after: list[Tensor]


@torch.no_grad()
def token_losses(model: nn.Module, head: Head, ids: Tensor) -> list[Tensor]:
    """Return the negative log-likelihoods ``(T - 1,)`` in nats of every sequence, on the CPU.

    The processes of a run share the sequences, and all have all losses.

    Args:
        ids: ``(N, T)`` token ids.
    """

    def losses(row: Tensor) -> Tensor:
        hidden, targets = hidden_states(model, head.decoder, row)[:, :-1], row[0, 1:]
        chunks = zip(hidden.split(POSITIONS, 1), targets.split(POSITIONS), strict=True)
        return torch.cat(
            [nn.functional.cross_entropy(head(h)[0].float(), t, reduction="none") for h, t in chunks]
        ).cpu()

    with evaluating(model):
        return dealt(losses, ids.to(head.model.device).split(1))


def score(model: nn.Module, head: Head, texts: dict[str, Tensor]) -> Losses:
    """Return text -> losses of its sequences."""
    return {name: token_losses(model, head, ids) for name, ids in texts.items()}


def nats(losses: Losses) -> dict[str, float]:
    """Return text -> mean loss per predicted token."""
    return {name: torch.cat(some).double().mean().item() for name, some in losses.items()}


def check_losses(**models: Losses) -> None:
    """Raise :class:`NumericsError` where a model that goes in predicts no numbers.

    Args:
        models: losses of the ``dense`` and of the ``compressed`` one.
    """
    for model, losses in models.items():
        for name, mean in nats(losses).items():
            if not math.isfinite(mean):
                raise NumericsError(
                    f"the {model} model's loss is NaN or infinite on {name!r}; check its weights and their dtype"
                )


def allowed(before: dict[str, float], after: dict[str, float], tolerance: float) -> bool:
    """Return whether the texts gain on average and none loses more than a tolerance.

    Args:
        before, after: text -> nats per predicted token.
        tolerance: of the ratio of perplexities, e.g. 0.02.
    """
    gaps = [after[name] - before[name] for name in before]
    return sum(gaps) < 0 and max(gaps) <= math.log1p(tolerance) and all(map(math.isfinite, gaps))


def worse_kinds(probes: Probes, kinds: dict, losses: ProbeLosses, tolerance: float) -> dict[str, float]:
    """Return kind of probe text -> ratio of perplexities, of those that the dense model knows and training made worse.

    Passages are few, so a kind is worse where its loss is beyond the tolerance by more than chance.

    Args:
        kinds: kind -> what the record says of it.
        tolerance: see :func:`allowed`; at least :data:`OTHER_TEXT`.
    """
    found, tolerance = {}, max(tolerance, OTHER_TEXT)
    for kind in (kind for kind, facts in kinds.items() if facts["is_known"]):
        mine = [i for i, other in enumerate(probes.kinds) if other == kind]
        gap = compare_losses(*([x[i][: probes.lengths[i] - 1] for i in mine] for x in (losses.before, losses.after)))
        if not gap.difference - CERTAIN * (gap.standard_error or 0.0) <= math.log1p(tolerance):
            found[kind] = perplexity_of(gap.difference)
    return found


def why_not(
    before: Losses, after: Losses, worse: dict[str, float], tolerance: float, *, is_trained: bool
) -> str | None:
    """Return why a trained model is not better than what went in; ``None`` where it is.

    Args:
        before, after: losses on held-out sequences of the texts trained on, which may gain while others are lost.
        worse: of :func:`worse_kinds`.
        tolerance: see :func:`allowed`.
        is_trained: whether any trained weights were kept; without, the losses differ by rounding alone.
    """
    if not (is_trained and allowed(nats(before), nats(after), tolerance)):
        return f"the held-out texts do not gain on average, or one loses more than {tolerance:.0%}"
    lost = [f"{kind} (perplexity x {ratio:.2f})" for kind, ratio in worse.items()]
    return f"of the probe texts, {', '.join(lost)} lost more than {max(tolerance, OTHER_TEXT):.0%}" if lost else None


class Judge(TrainerCallback):
    """Score held-out texts every ``every`` steps, keep the best allowed state in a folder, and save with every score
    where a killed run is to go on.

    Several processes have the same scores, and so the same best state; the first one writes it.

    Args:
        model: with what is tuned.
        base: the transformers model in it.
        texts: name -> ``(N, T)`` held-out token ids.
        before: of :func:`nats`, before training.
        folder: of the unfinished run.
        tolerance: see :func:`allowed`.
    """

    def __init__(
        self,
        model: nn.Module,
        base: PreTrainedModel,
        texts: dict[str, Tensor],
        before: dict[str, float],
        folder: Path,
        tolerance: float,
    ):
        self.model, self.head, self.texts, self.before = model, Head(base), texts, before
        self.folder, self.every, self.tolerance = folder, 1, tolerance
        self.history: list[dict] = from_first(self._scored)

    def _scored(self) -> list[dict]:
        path = self.folder / HISTORY
        return read_json(path, self.folder)["scores"] if path.exists() else []

    @property
    def best(self) -> dict:
        """The score of the best allowed state; the first one where there is no better."""
        fit = [one for one in self.history[1:] if allowed(self.before, one["nats"], self.tolerance)]
        return min([self.history[0], *fit], key=_mean)

    def note(self) -> str:
        """Return the last score as a phrase."""
        last = self.history[-1]["nats"] if self.history else {}
        return ", ".join(f"{name} {perplexity_of(loss):.2f}" for name, loss in last.items())

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.history = [one for one in self.history if one["step"] <= state.global_step]  # later ones come again
        if not self.history:
            self._keep(0, self.before)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            with together():
                found = nats(score(self.model, self.head, self.texts))
            control.should_training_stop |= not self._keep(state.global_step, found)
            control.should_save = args.save_strategy != "no"

    def _keep(self, step: int, found: dict[str, float]) -> bool:
        """Add a score, and keep the weights where it is the best; return whether every loss is a number."""
        if not all(map(math.isfinite, found.values())):
            log.warning("step %d: a loss is not finite, so training stops; the best state before it is kept", step)
            return False
        self.history.append({"step": step, "nats": found})
        on_first(self._write)
        return True

    def _write(self) -> None:
        if self.best is self.history[-1]:
            write_tensors(self.folder / BEST, self._tuned())
        write_json(self.folder / HISTORY, {"scores": self.history})

    def _tuned(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def restore_best(self) -> None:
        """Give the model the weights of the best allowed state, which the first of several processes has written."""
        best = read_tensors(self.folder / BEST, self.folder) if is_first() else {}
        self.model.load_state_dict(broadcast(best), strict=False)


def _mean(one: dict) -> float:
    return sum(one["nats"].values()) / len(one["nats"])


def gains(dense: Losses, before: Losses, after: Losses) -> dict[str, dict]:
    """Return text -> its perplexities, the ratio of after to before and the standard error of its logarithm."""
    found = {}
    for name in before:
        gap = compare_losses(before[name], after[name])
        found[name] = {
            "perplexity_dense": perplexity_of(nats({name: dense[name]})[name]),
            "perplexity_before": perplexity_of(gap.dense),
            "perplexity": perplexity_of(gap.compressed),
            "ratio": perplexity_of(gap.difference),
            "standard_error": gap.standard_error,
            "sequences": len(before[name]),
        }
    return found
