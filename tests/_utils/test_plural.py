"""Counts in messages, tables and cards: one of a thing has no plural."""

import pytest

from rankfold._utils.sizes import plural
from rankfold.report.model_card import measured_on
from rankfold.report.outcomes import held_out_row, kind_rows, recovery_lines

NUMBERS = {"perplexity_dense": 2.0, "perplexity": 3.0, "perplexity_before": 4.0, "ratio": 1.5}


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (2048, "2,048 tokens")])
def test_a_count_has_its_plural(count, text):
    assert plural(count, "token") == text


def test_a_record_of_one_of_each_has_no_plural():
    kinds = {"kinds": {"prose": NUMBERS | {"passages": 1, "is_known": True, "is_damaged": False}}}
    recovery = {
        "recovered": True,
        "tuned_parameters": 1,
        "tune": "norms",
        "tokens_seen": 1,
        "texts": {"a.txt": {}},
        "loss": "next-token",
        "held_out": {"a.txt": NUMBERS | {"sequences": 1}},
        "teacher_name": "dense",
        "probe_texts_before": kinds,
    }
    lines = [
        held_out_row(NUMBERS | {"windows": 1})[-1],
        *(row[-1] for row in kind_rows(kinds)),
        *recovery_lines({"recovery": recovery, "probe_texts": kinds}),
        measured_on({"kind": "image-text examples", "num_samples": 1, "tokens": 1}),
    ]
    assert [line.rpartition(" on ")[2] for line in lines] == [
        "1 held-out calibration sample",
        "1 probe text",
        "1 token of a.txt towards the next token",
        "1 held-out sequence",
        "1 probe text",
        "1 image-text example of 1 token",
    ]
