"""Tokens per second of models beside a dense one, in as many rounds as it takes to tell faster from slower.

Every round runs all models once, in turning order; a ratio is formed within a round. Rounds end when the middle half of the
ratios of every model, of prefill and of decode, lies on one side of 1, or at the most there may be. A ratio whose middle half
still holds 1 then is no difference, and tables say so.
"""

import statistics

import common
from rankfold.evaluation.speed import prompts, run

KINDS = ("prefill", "decode")
DEFINITIONS = {
    "prefill, decode": "prefill: B x T prompt tokens over the time of one forward that fills the cache and computes the last "
    "logits; decode: B x S tokens over the time of S greedy steps with that cache; medians over rounds, one round before "
    "them is not counted",
    "ratio": "compressed over dense within a round; median over rounds, in brackets its quartiles",
    "no difference measured": "the quartiles of the ratio lie on both sides of 1 after the most rounds there may be",
}


def add_arguments(parser) -> None:
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--least", type=int, default=7, help="rounds, whatever they show")
    parser.add_argument("--most", type=int, default=40, help="rounds, where the quartiles do not settle")


def options_of(args) -> dict:
    options = {name: getattr(args, name) for name in ("batch", "prompt", "steps", "least", "most")}
    if not 4 <= args.least <= args.most:
        raise SystemExit(
            f"--least must be at least 4, for quartiles, and at most --most; got {args.least} and {args.most}"
        )
    return options


def measure(models: dict, *, batch: int, prompt: int, steps: int, least: int, most: int) -> dict:
    """``{"rounds", "models": {name: {kind: summary}}}``; the first model is the one the others are compared with."""
    ids = prompts(models, batch, prompt)
    names, tokens = list(models), dict(zip(KINDS, (batch * prompt, batch * steps), strict=True))
    speeds = {name: {kind: [] for kind in KINDS} for name in names}
    for turn in range(most + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = run(models[name], ids, steps)
            if turn:  # the first round warms up caches and kernels
                for kind, taken in zip(KINDS, seconds, strict=True):
                    speeds[name][kind].append(tokens[kind] / taken)
        if turn >= least and all(settled(found[kind]) for found in _summaries(speeds).values() for kind in KINDS):
            break
    common.say(f"{turn} rounds")
    dense = {kind: {"tokens_per_second": statistics.median(speeds[names[0]][kind])} for kind in KINDS}
    return {"rounds": turn, "models": {names[0]: dense} | _summaries(speeds)}


def _summaries(speeds: dict) -> dict:
    """Of all models but the first."""
    first, *others = speeds
    return {name: {kind: summary(speeds[name][kind], speeds[first][kind]) for kind in KINDS} for name in others}


def summary(mine: list[float], reference: list[float]) -> dict:
    ratios = [a / b for a, b in zip(mine, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"tokens_per_second": statistics.median(mine), "ratio": middle, "quartiles": [low, high]}


def settled(found: dict) -> bool:
    """Whether the middle half of the ratios is on one side of 1."""
    low, high = found["quartiles"]
    return low > 1 or high < 1


def cell(found: dict) -> str:
    speed = f"{found['tokens_per_second']:,.0f}"
    if "ratio" not in found:
        return f"{speed} × 1"
    low, high = found["quartiles"]
    note = "" if settled(found) else ", no difference measured"
    return f"{speed} × {found['ratio']:.2f} [{low:.2f}, {high:.2f}]{note}"
