"""Printing that several commands share."""

import json
import sys

from rich.console import Console


def console() -> Console:
    """For everything that is not the result."""
    return Console(file=sys.stderr)


def emit(result: dict, as_json: bool, human) -> None:
    """Print the result: one JSON object on stdout, or whatever ``human(console)`` prints there."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        human(Console(file=sys.stdout, highlight=False))


def outcome(held_out: dict) -> str:
    """What became of the calibration windows that were not fitted."""
    numbers = "perplexity {perplexity_dense:.2f} -> {perplexity:.2f} (x {ratio:.2f}) on {windows} held-out calibration windows"
    return numbers.format(**held_out)
