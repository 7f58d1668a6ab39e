"""The learning rate that suits a model: a trial step shows how much it changes what the model predicts.

Models differ a hundredfold in it, by the size of their weights and by how much a change of these matters.
"""

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._utils.present import present
from .tuning import Tune

CHANGE = 0.045  # of the log-likelihood of a token, root of the mean square: a divergence of about 0.001 nats
# The largest learning rate, in steps that change so much; as measured on SmolLM2-135M (docs/recover.md). Most of what a
# step of AdamW changes is noise, of which the next steps undo much, so it may be more than one.
TIMES: dict[Tune, float] = {"all": 10.0, "lora": 2.0, "lora-mlp": 1.0, "norms": 1.5}
FIRST = 1e-5  # of the size of the weights: small enough that twice the step is twice the change
TRIALS = 3


def measured_rate(
    network: nn.Module, tune: Tune, backward: Callable[[], None], token_losses: Callable[[], Tensor]
) -> float:
    """Return a learning rate of two digits, from one gradient and four forwards; the weights are as they were.

    AdamW changes every weight by about the learning rate a step. So a step along the signs of the gradient is tried,
    and the learning rate is some times the step that changes predictions by :data:`CHANGE`.

    Args:
        network: of which the weights that require a gradient are trained.
        backward: gives them the gradient of what is trained on.
        token_losses: computes the negative log-likelihoods of other text, in nats.
    """
    backward()
    trained = [p for p in network.parameters() if p.grad is not None]
    signs = [present(p.grad).sign_() for p in trained]
    before, kept = token_losses(), [p.detach().clone() for p in trained]
    step = FIRST * _size(kept)
    for _ in range(TRIALS):
        with torch.no_grad():
            for p, sign in zip(trained, signs, strict=True):
                p.sub_(sign, alpha=step)
        change = (token_losses() - before).double().square().mean().sqrt().item()
        with torch.no_grad():
            for p, old in zip(trained, kept, strict=True):
                p.copy_(old)
        if not (math.isfinite(change) and change > 0):
            break
        step *= min(CHANGE / change, 1000.0)
    network.zero_grad()
    return float(f"{TIMES[tune] * step:.1e}")


def rate_by_size(relative: float, weights: list[nn.Parameter]) -> float:
    """Return the learning rate of two digits that is this fraction of the size of the weights: of the matrices, or of
    vectors where there are none."""
    return float(f"{relative * _size([w for w in weights if w.dim() > 1] or weights):.1e}")


def _size(weights: list[nn.Parameter] | list[Tensor]) -> float:
    """Median over weights of the root of their mean square, without those that are zero, as adapters begin; 1 where all
    are, as the offsets from 1 that some families have for the scales of norms."""
    sizes = [size for w in weights if (size := w.detach().float().square().mean().sqrt().item())]
    return statistics.median(sizes or [1.0])
