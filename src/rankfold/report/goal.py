"""What was asked for in place of a sparsity, and what came out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._utils.schema import NUMBER, Maybe
from .._utils.sizes import parse_size, size_text
from ..errors import OptionError, check_choice, option
from .plan import Plan

GGUF_DTYPES = ("float32", "bfloat16", "float16", "q8_0", "q5_0", "q4_0")  # of a GGUF file
RUNS = [{"sparsity": NUMBER, "got": NUMBER}]
# What a record says of a goal; of most runs, which were given a sparsity, nothing.
GOAL = {
    "option": str,
    "asked": NUMBER,
    "predicted": Maybe(NUMBER),
    "got": NUMBER,
    "earlier_runs": RUNS,
    "dtype": Maybe(str),  # of a file; of all others nothing
    "later_runs": Maybe(RUNS),  # added when the search is over, as are its seconds
    "search_seconds": Maybe(NUMBER),
}


@dataclass(frozen=True)
class Goal:
    """What was asked for in place of a sparsity.

    Attributes:
        option: ``target_size``, bytes of all weights, or of a GGUF file; or ``keep_quality``, the fraction of the
            likelihood of a held-out token that is kept: the dense model's perplexity over the compressed one's.
        asked: of that.
        predicted: before the run; ``None`` where nothing was measured to predict it by.
        earlier_runs: at other sparsities, each with what it got.
        dtype: of the GGUF file, one of :data:`GGUF_DTYPES`; ``None``: all weights in the dtype that is written.
    """

    option: str
    asked: float
    predicted: float | None = None
    earlier_runs: tuple[dict[str, float], ...] = ()
    dtype: str | None = None

    def outcome(self, plan: Plan, held_out: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what the record says of it.

        Args:
            plan: of the run.
            held_out: what was measured on held-out samples.
        """
        if self.option == "keep_quality":
            got = kept_quality(held_out or {})
        else:
            got = plan.file["bytes"] if plan.file else plan.bytes_after
        return {
            "option": self.option,
            "asked": self.asked,
            **({"dtype": self.dtype} if self.dtype else {}),
            "predicted": self.predicted,
            "got": got,
            "earlier_runs": [*self.earlier_runs],
        }


def kept_quality(held_out: Mapping[str, Any]) -> float:
    """Return the kept fraction of the likelihood of a held-out token, by what a record says of these samples."""
    return 1 / held_out["ratio"]


def goal_line(record: Mapping[str, Any]) -> str | None:
    """Return :func:`asked_and_got` with the other runs of a search, and the time of all together."""
    line, goal = asked_and_got(record), record.get("goal") or {}
    others = [
        f"{run['got']:.4f} at sparsity {run['sparsity']:g}"
        for run in (*goal.get("earlier_runs", ()), *(goal.get("later_runs") or ()))
    ]
    took = goal.get("search_seconds")
    return line and (
        line
        + (f"; the other runs got {', '.join(others)}" if others else "")
        + (f"; the search took {took:.1f} s in all" if took is not None else "")
    )


def asked_and_got(record: Mapping[str, Any]) -> str | None:
    """Return one line on what was asked, predicted and got; ``None`` where a sparsity was asked for."""
    goal = record.get("goal")
    if goal is None:
        return None
    if goal["option"] == "target_size":
        what = f"as a GGUF file in {goal['dtype']}" if goal.get("dtype") else "of weights"
        return f"asked for at most {size_text(goal['asked'])} {what}: got {size_text(goal['got'])}"
    predicted = "" if goal.get("predicted") is None else f"predicted {goal['predicted']:.4f}, "
    return (
        f"asked to keep {goal['asked']:g} of the likelihood of a held-out token: {predicted}got {goal['got']:.4f} at "
        f"sparsity {record['plan']['method']['sparsity']:g}"
    )


def goal_of(target_size: int | str | None, keep_quality: float | None) -> Goal | None:
    """Return the goal of a run of a given size; ``None`` without a size. A quality, which takes several runs, is only
    checked.

    Raises:
        OptionError: a size or its dtype that does not parse, or a quality out of range.
    """
    if keep_quality is not None:
        check_quality(keep_quality)
    if target_size is None:
        return None
    if not isinstance(target_size, str) or ":" not in target_size:
        return Goal("target_size", parse_size(target_size))
    size, _, dtype = target_size.partition(":")
    check_choice(f"dtype of a GGUF file in {option('target_size')}", dtype, GGUF_DTYPES)
    return Goal("target_size", parse_size(size), dtype=dtype)


def check_quality(keep_quality: float) -> None:
    """Raise :class:`OptionError` for what is no fraction between nothing and all."""
    if not 0 < keep_quality < 1:
        raise OptionError(
            f"{option('keep_quality')} must be in (0, 1), got {keep_quality}; 0.95 keeps 95 % of the likelihood"
        )
