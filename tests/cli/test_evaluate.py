"""The tables of `rankfold evaluate`."""

import io

from rich.console import Console

from rankfold.cli.evaluate import _speed
from rankfold.evaluation.speed import RATIOS


def printed(names: str, *, ratio: float) -> str:
    speeds = {f"{kind}_tokens_per_second": 17.0 for kind in ("prefill", "decode")}
    speeds |= {f"{kind}_ratio": ratio for kind in ("prefill", "decode")}
    facts = speeds | {"prefill_range": [1, 20], "decode_range": [1, 20]}
    facts |= {"first_token_seconds": 0.1, "peak_memory_bytes": None}
    out = Console(file=io.StringIO(), width=200)
    out.print(_speed([{"batch": 1, "models": dict.fromkeys(names, facts)}], dict(zip(names, names, strict=True))))
    return out.file.getvalue()


def test_a_ratio_is_explained_where_there_is_one():
    """It is not the quotient of the speeds in the table."""
    two = printed("ab", ratio=1.04)
    assert "1.04, 1.04" in two and "ratios" in two and RATIOS in " ".join(two.split())
    alone = printed("a", ratio=1.0)
    assert "17 [1, 20]" in alone and "ratios" not in alone and "1.00" not in alone
