"""Tokens per second of models beside each other.

Shape legend: B sequences, T prompt tokens, S tokens decoded per sequence.
"""

import statistics
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._utils.evaluating import cache_for
from .._utils.hardware import in_rounds, now
from .._utils.progress import track
from ..architectures import context_of
from ..errors import OptionError

DEFINITION = (
    "prefill: B x T prompt tokens over the time of one forward that fills the cache and computes the last logits; "
    "first token: that time; "
    "decode: B x S tokens over the time of S greedy steps with that cache; medians over rounds, every round runs all "
    "models in turning order; ratio: median over rounds of the speed over the first model's in the same round; one "
    "round before them is not counted"
)
# For reports, where a ratio stands beside the two speeds and need not be their quotient.
RATIOS = (
    "ratios compare two models within a round and are medians over rounds; each speed is a median of its own, so the "
    "quotient of two speeds may differ from their ratio"
)
PROMPT, STEPS = 256, 32


def speed(
    models: Mapping[str, PreTrainedModel],
    *,
    batch: int = 8,
    prompt: int = PROMPT,
    steps: int = STEPS,
    repeats: int = 5,
    seed: int = 0,
) -> dict:
    """Measure prefill and batched decode of several models in paired, alternating runs
    (:func:`rankfold._utils.hardware.in_rounds`).

    Args:
        models: name -> causal language model in eval mode; the first is what the others are compared with.
        batch: sequences B, ``>= 1``.
        prompt: random prompt tokens T of each, ``>= 1``.
        steps: decoded tokens S of each, ``>= 1``.
        repeats: measured rounds, ``>= 1``.
        seed: of the prompts.

    Returns:
        ``{"models": {name: {"prefill_tokens_per_second", "decode_tokens_per_second", "prefill_ratio", "decode_ratio",
        "prefill_range", "decode_range", "first_token_seconds"}}, "batch", "prompt", "steps", "repeats",
        "definition"}``; ranges are ``[slowest, fastest]`` round.

    Raises:
        OptionError: nothing to measure, or more tokens than a model's context.
    """
    _check(models, batch, prompt, steps, repeats)
    ids = prompts(models, batch, prompt, seed)
    calls = {name: partial(run, model, ids, steps) for name, model in models.items()}
    _, *rounds = in_rounds(calls, track(range(repeats + 1), "measuring speed"))  # the first warms up caches and kernels
    speeds = {name: [(batch * prompt / a, batch * steps / b) for a, b in (r[name] for r in rounds)] for name in models}
    reference = next(iter(speeds.values()))
    return {
        "models": {name: _summary(mine, reference, batch * prompt) for name, mine in speeds.items()},
        "batch": batch,
        "prompt": prompt,
        "steps": steps,
        "repeats": repeats,
        "definition": DEFINITION,
    }


def _check(models: Mapping[str, PreTrainedModel], batch: int, prompt: int, steps: int, repeats: int) -> None:
    if not models:
        raise OptionError("no models to measure; give at least one")
    for name, value in {"batch": batch, "prompt": prompt, "steps": steps, "repeats": repeats}.items():
        if value < 1:
            raise OptionError(f"{name} must be >= 1, got {value}")
    for name, model in models.items():
        context = context_of(model.config)
        if context is not None and prompt + steps > context:
            raise OptionError(
                f"prompt + steps is {prompt + steps}, more than the context of {name}, {context}; lower them"
            )


def lengths(context: int) -> tuple[int, int]:
    """Prompt tokens and decoded tokens, fewer than usual where a context has no room for so many."""
    steps = min(STEPS, max(1, context // 4))
    return min(PROMPT, context - steps), steps


def prompts(models: Mapping[str, PreTrainedModel], batch: int, prompt: int, seed: int = 0) -> Tensor:
    """``(B, T)`` random ids that all the models know."""
    vocabulary = min(m.config.get_text_config().vocab_size for m in models.values())
    return torch.randint(vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor, steps: int) -> tuple[float, float]:
    """Seconds of the prefill and of the decode of one run over ``(B, T)`` ids."""
    device = model.device
    ids = ids.to(device)
    cache = cache_for(model)
    started = now(device)
    out = model(ids, use_cache=True, logits_to_keep=1, **cache)  # (B, 1, vocabulary)
    filled = now(device)
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)  # (B, 1)
        out = model(token, use_cache=True, **cache)
    return filled - started, now(device) - filled


def _summary(mine: list[tuple[float, float]], reference: list[tuple[float, float]], tokens: int) -> dict:
    summary = {"first_token_seconds": statistics.median(tokens / prefill for prefill, _ in mine)}
    for kind, name in enumerate(("prefill", "decode")):
        values = [run[kind] for run in mine]
        ratios = [run[kind] / base[kind] for run, base in zip(mine, reference, strict=True)]
        summary |= {
            f"{name}_tokens_per_second": statistics.median(values),
            f"{name}_ratio": statistics.median(ratios),
            f"{name}_range": [min(values), max(values)],
        }
    return summary
