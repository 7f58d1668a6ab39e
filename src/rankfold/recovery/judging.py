"""Whether training helps: held-out text scored before, during and after; the best state is kept.

Shape legend: N sequences, T tokens.
"""

import logging
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from .._utils.evaluating import evaluating
from .._utils.files import read_json, write_json
from ..calibration.likelihood import compare_losses, perplexity_of
from .loss import POSITIONS, Head, hidden_states

log = logging.getLogger(__name__)

HISTORY, BEST = "history.json", "best.safetensors"


@torch.no_grad()
def token_losses(model: nn.Module, head: Head, ids: Tensor) -> list[Tensor]:
    """Return the negative log-likelihoods ``(T - 1,)`` in nats of every sequence, on the CPU.

    Args:
        ids: ``(N, T)`` token ids.
    """
    found = []
    with evaluating(model):
        for row in ids.to(head.model.device).split(1):
            hidden, targets = hidden_states(model, head.decoder, row)[:, :-1], row[0, 1:]
            chunks = zip(hidden.split(POSITIONS, 1), targets.split(POSITIONS), strict=True)
            losses = [nn.functional.cross_entropy(head(h)[0].float(), t, reduction="none") for h, t in chunks]
            found.append(torch.cat(losses).cpu())
    return found


def score(model: nn.Module, head: Head, texts: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return text -> losses of its sequences."""
    return {name: token_losses(model, head, ids) for name, ids in texts.items()}


def nats(losses: dict[str, list[Tensor]]) -> dict[str, float]:
    """Return text -> mean loss per predicted token."""
    return {name: torch.cat(some).double().mean().item() for name, some in losses.items()}


def allowed(before: dict[str, float], after: dict[str, float], tolerance: float) -> bool:
    """Return whether some text gains and none loses more than a tolerance.

    Args:
        before, after: text -> nats per predicted token.
        tolerance: of the ratio of perplexities, e.g. 0.02.
    """
    gaps = [after[name] - before[name] for name in before]
    return min(gaps) < 0 and max(gaps) <= math.log1p(tolerance) and all(map(math.isfinite, gaps))


class Judge(TrainerCallback):
    """Score held-out texts every ``every`` steps, keep the best allowed state in a folder, and save with every score.

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
        self.history: list[dict] = read_json(folder / HISTORY)["scores"] if (folder / HISTORY).exists() else []

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
            control.should_training_stop |= not self._keep(
                state.global_step, nats(score(self.model, self.head, self.texts))
            )
            control.should_save = True

    def _keep(self, step: int, found: dict[str, float]) -> bool:
        """Add a score, and keep the weights where it is the best; return whether every loss is a number."""
        if not all(map(math.isfinite, found.values())):
            log.warning("step %d: a loss is not finite, so training stops; the best state before it is kept", step)
            return False
        self.history.append({"step": step, "nats": found})
        if self.best is self.history[-1]:
            save_file(self._tuned(), self.folder / BEST)
        write_json(self.folder / HISTORY, {"scores": self.history})
        return True

    def _tuned(self) -> dict[str, Tensor]:
        return {name: p.detach().contiguous() for name, p in self.model.named_parameters() if p.requires_grad}

    def restore_best(self) -> None:
        """Give the model the weights of the best allowed state."""
        self.model.load_state_dict(load_file(self.folder / BEST), strict=False)


def _mean(one: dict) -> float:
    return sum(one["nats"].values()) / len(one["nats"])


def gains(
    dense: dict[str, list[Tensor]], before: dict[str, list[Tensor]], after: dict[str, list[Tensor]]
) -> dict[str, dict]:
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
