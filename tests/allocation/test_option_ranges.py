"""The ranges of options of allocations and budgets: their ends are taken, what lies beyond is refused with its rule."""

import pytest

from rankfold.allocation import OWL, Bytes, FLOPs, Influence, Latency, Measured
from rankfold.errors import OptionError

CONTEXT = "must be >= 1, got 0; it is the tokens of one sequence"


@pytest.mark.parametrize(
    ("kind", "option", "allowed", "refused", "told"),
    [
        (Measured, "other_texts", 0, -0.25, r"must be in \[0, 1\], got -0.25"),
        (Measured, "other_texts", 1, 1.25, r"must be in \[0, 1\], got 1.25"),
        (Influence, "temperature", 1e-9, 0.0, r"must be > 0, got 0.0"),
        (OWL, "threshold", 1e-9, 0, r"must be > 0, got 0; the paper takes 3 to 10"),
        (OWL, "spread", 0.99, 1, r"must be in \[0, 1\), got 1; the paper takes 0.02 to 0.2"),
        (OWL, "spread", 0, -0.5, r"must be in \[0, 1\), got -0.5; the paper takes 0.02 to 0.2"),
        (FLOPs, "context", 1, 0, CONTEXT),
        (Latency, "context", 1, 0, CONTEXT),
        (Bytes, "context", 1, 0, CONTEXT),
        (Bytes, "batch", 0, -1, "must be >= 0, got -1; it is the sequences whose cache is counted"),
    ],
)
def test_the_ends_of_a_range(kind, option, allowed, refused, told):
    assert getattr(kind(**{option: allowed}), option) == allowed
    with pytest.raises(OptionError, match=f"^{option} of {kind.kind} {kind.name} {told}$"):
        kind(**{option: refused})


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (OWL, "spread=wide", "spread of allocation owl must be a number, got 'wide'"),
        (OWL, "spread=nan", "spread of allocation owl must be a finite number, got nan"),
        (Bytes, "batch=1.5", "batch of budget bytes must be a whole number, got '1.5'"),
        (Bytes, "batch=1,batch=1", "budget bytes gives 'batch' more than once; give it once"),
    ],
)
def test_text_that_is_no_option_is_refused(kind, options, told):
    with pytest.raises(OptionError, match=f"^{told}$"):
        kind.of_text(options)
