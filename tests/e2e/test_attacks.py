"""A slice of `make attack`: every case is a kind and a seed, and must be done or refused in one line."""

import pytest
import torch
from attacks.arena import HELD, KINDS, Arena

from rankfold.data.text import Text
from rankfold.errors import CheckpointError

SEEDS = range(25)


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    return Arena(tmp_path_factory.mktemp("attacks") / "arena")


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_is_done_or_refused(arena, kind):
    outcomes = [arena.attack(kind, seed) for seed in SEEDS]
    assert not [outcome for outcome in outcomes if outcome.verdict not in HELD]
    assert {outcome.verdict for outcome in outcomes} >= {"done", "refused"}, (
        "it attacks nothing, or nothing can be done"
    )


@pytest.mark.parametrize("failure", ["traceback", "messy"])
def test_what_does_not_hold_is_seen(arena, monkeypatch, failure):
    """Outputs that are half written or exceptions of the program must not pass for refusals."""

    def fail(*args, **kwargs):
        if failure == "traceback":
            raise KeyError("a bug")
        arena.folder.joinpath("case", "out").mkdir()
        raise CheckpointError("half of it is written")

    monkeypatch.setattr("rankfold.pipeline.compress", fail)
    outcomes = [arena.attack("moments", seed) for seed in SEEDS]
    assert {outcome.verdict for outcome in outcomes} == {"refused", failure}


@pytest.mark.parametrize(
    "kind, name, value",
    [
        ("checkpoints", "computed", torch.zeros(1, 24, 400)),
        ("moments", "_weights", property),  # never equal to another call's
        ("texts", "read_text", Text("", ("another text",), "")),
    ],
)
def test_numbers_and_texts_that_nothing_accounts_for_are_wrong(arena, monkeypatch, kind, name, value):
    give = value if value is property else lambda *args, **kwargs: value
    monkeypatch.setattr(f"attacks.arena.{name}", give)
    wanted = {"refused", "wrong"}
    for seed in SEEDS:
        wanted -= {arena.attack(kind, seed).verdict}
        if not wanted:
            return
    raise AssertionError(f"none was {' or '.join(wanted)}")
