"""The tables of `rankfold evaluate`."""

import io
from collections import Counter

from rich.console import Console

from rankfold.cli.evaluate import _line, _speed, _tasks
from rankfold.evaluation.speed import RATIOS
from rankfold.evaluation.tasks import _plain


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


def test_a_metric_after_a_filter_is_in_the_table():
    """GSM8K's answers are read in two ways, and lm-eval names the filter after metric and error."""
    ways = {"strict-match": 0.25, "flexible-extract": 0.375}
    found = {f"exact_match,{way}": share for way, share in ways.items()}
    found |= {f"exact_match_stderr,{way}": share / 10 for way, share in ways.items()}
    result = {"results": {"gsm8k": {"alias": "gsm8k"} | found}, "n-samples": {"gsm8k": {"effective": 8}}}
    result |= {"group_subtasks": {}, "n-shot": {"gsm8k": 5}, "versions": {"gsm8k": 3}}
    out = Console(file=io.StringIO(), width=200)
    out.print(_tasks({"gsm8k": _plain("gsm8k", result, Counter())}))
    for way, share in ways.items():
        (line,) = [line for line in out.file.getvalue().splitlines() if f"exact_match,{way}" in line]
        assert f"{share:.4f}" in line and f"{share / 10:.4f}" in line and " 8 " in line


def test_one_sample_is_no_samples():
    result = {"perplexity": 2.0, "length": 64, "text": "a.txt", "definition": "as ever"}
    for windows, expected in ((1, "on 1 sample of 64 tokens"), (2, "on 2 samples of 64 tokens")):
        assert expected in _line(result | {"windows": windows})
