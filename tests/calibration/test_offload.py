"""Hidden states off the device: the same numbers, in less memory, and nothing is left on the disk."""

import errno
import itertools
import random
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

import rankfold
from allocations import peak_bytes
from families import opened, tokens
from interrupted import assert_ends_in_the_same_bytes
from rankfold.calibration import offload, runner
from rankfold.calibration.offload import Offload
from rankfold.errors import CheckpointError, OptionError
from rankfold.methods import make_method
from saved import save_tiny

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def batch_of(number: int) -> torch.Tensor:
    """States of a size and a dtype that depend on the number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1 + number % 3, 5, 4, generator=generator).to(DTYPES[number % 2])


@pytest.fixture(params=["cpu", "disk"])
def kept(request, tmp_path):
    return Offload(CPU, None if request.param == "cpu" else tmp_path)


def test_states_come_back_as_they_were_whatever_the_order(kept):
    """Reads in and out of order, with writes between a read-ahead and its use; a copy goes its own way."""
    states, expected, order = kept.states(), [], random.Random(0)
    for number in range(6):
        states.append(batch_of(number))
        expected.append(batch_of(number))
    other, before = states.copy(), list(expected)
    for step in range(200):
        index = order.choice([step % 6, step % 6, order.randrange(6)])
        if order.random() < 0.5:
            assert torch.equal(states[index], expected[index])
        else:
            expected[index] = batch_of(index) * step
            states[index] = batch_of(index) * step
    for mine, theirs in ((states, expected), (other, before)):
        assert len(mine) == 6 and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert states[0] is states[0]


def test_a_place_is_of_one_shape(tmp_path):
    states = Offload(CPU, tmp_path).states()
    states.append(batch_of(0))
    with pytest.raises(ValueError, match="is no place for torch.float32 of"):
        states[0] = batch_of(2)


def test_nothing_is_seen_on_the_disk(tmp_path):
    states = Offload(CPU, tmp_path).states()
    states.append(batch_of(0))
    assert torch.equal(states[0], batch_of(0)) and not [*tmp_path.iterdir()]


def test_a_full_disk_is_told_at_the_next_batch_or_before(tmp_path, monkeypatch):
    states = Offload(CPU, tmp_path).states()
    states.append(batch_of(0))
    assert torch.equal(states[0], batch_of(0))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(offload, "_bytes", full)
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}: No space left on device; free space"):
        for _ in range(2):
            states.append(batch_of(0))


def result_of(offload: Offload | None, method: str, mode: str, shards: int):
    source, data = opened("llama"), replace(tokens(24), shards=shards)
    source.offload = offload
    steps = {} if method == "sleb" else {"rank_multiple": 2}
    return rankfold.compress(source, method=make_method(method, **steps), calibration=data, mode=mode)


@pytest.mark.parametrize(
    "method, mode, shards", [("rankfold", "sequential", 2), ("modegpt", "one-pass", 1), ("sleb", "sequential", 1)]
)
def test_the_result_has_the_same_bytes(method, mode, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 96)  # several batches
    folder = tmp_path / "states"
    folder.mkdir()
    results = [result_of(where, method, mode, shards) for where in (None, Offload(CPU, folder))]
    dense, kept = (result.model.state_dict() for result in results)
    assert dense.keys() == kept.keys() and all(torch.equal(dense[name], kept[name]) for name in dense)
    assert [result.record["run"]["offload"] for result in results] == [None, "disk"]
    assert results[0].record["blocks"] == results[1].record["blocks"] and not [*folder.iterdir()]


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_TOKENS", 96)
    save_tiny(tmp_path / "model", blocks=3)
    where = itertools.cycle([None, tmp_path, None])  # whole, until it is stopped, and after that

    def compress(output):
        method = make_method("rankfold", rank_multiple=2, allocation="uniform")
        rankfold.compress(
            tmp_path / "model", method=method, calibration=tokens(24), output=output, offload=next(where), device="cpu"
        )

    assert_ends_in_the_same_bytes(compress, tmp_path, monkeypatch)


class AtOnce:
    """In place of a thread: PyTorch counts what is freed in the thread that is profiled."""

    def __init__(self, max_workers: int):
        assert max_workers == 1

    def submit(self, call, *arguments) -> Future:
        done: Future = Future()
        done.set_result(call(*arguments))
        return done


def test_the_peak_falls_by_what_is_kept_elsewhere_and_the_plan_knows(tmp_path, monkeypatch):
    """Of the default, whose three streams are most of what it takes here."""
    monkeypatch.setattr(offload, "ThreadPoolExecutor", AtOnce)
    source, data = opened("llama"), tokens(600)
    method = make_method("rankfold", rank_multiple=2, allocation="uniform")
    peaks, plans = [], []
    for where in (None, Offload(CPU, tmp_path)):
        source.offload = where

        def run():
            plans.append(rankfold.compress(source, method=method, calibration=data).plan.peak_memory_bytes)

        peaks.append(peak_bytes(run))
    streams = 3 * data.tokens * 32 * 4
    assert peaks[0] - peaks[1] == pytest.approx(streams, rel=0.25)
    assert plans[0] - plans[1] == pytest.approx(streams, rel=0.25)


@pytest.mark.parametrize(
    "value, message",
    [
        ("cpu", "offload='cpu' has no effect where blocks run on the CPU: .* give a folder on a disk, or leave it out"),
        ("no/such", "offload takes cpu or an existing folder that can be written, got 'no/such'"),
    ],
)
def test_a_place_that_cannot_be_taken_is_told(value, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        rankfold.open_model(save_tiny(tmp_path / "model"), device="cpu", offload=value)


def test_moments_leave_no_states_to_keep_elsewhere(tmp_path):
    source = opened("llama")
    moments = rankfold.calibrate(source, calibration=tokens(4))
    for call in (rankfold.compress, rankfold.plan):
        with pytest.raises(OptionError, match="offload keeps the hidden states of text .* leave one of them out"):
            call(save_tiny(tmp_path / "model"), method="modegpt", moments=moments, offload=tmp_path, device="cpu")
