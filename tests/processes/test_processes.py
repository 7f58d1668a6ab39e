"""Runs that several processes share: the same bytes, whatever their number; one that ends, and errors of one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rankfold
from families import opened, some_ids, tokens
from rankfold import make_method
from rankfold._utils import processes
from rankfold.calibration import runner
from rankfold.calibration.experts import STATISTICS
from rankfold.calibration.likelihood import token_losses
from rankfold.calibration.moments import sum_shards
from rankfold.calibration.providers import HiddenStates, StoredMoments
from rankfold.calibration.runner import Stream, measure, start
from rankfold.calibration.store import MomentStore
from rankfold.checkpoint.run import RECORD
from rankfold.compression import kl_divergence
from rankfold.compression.block import RunContext, _owners
from rankfold.data import load
from rankfold.data.calibration_data import CalibrationData
from rankfold.errors import OptionError
from rankfold.models.opening import open_model
from rankfold.report.record import records_of
from saved import save_text, save_tiny
from shared_runs import BASE, BOTH, EVERY, SHARDS, WORKER, run, save_both
from warm import RANKFOLD

STOPPED = "modegpt"  # the case whose second process ends in the middle
STOPS = """
import os, sys, shared_runs
from rankfold.pipeline import CompressionRun
step = CompressionRun._compress_block

def stop(self, read, index, basis):
    if index == 2 and os.environ["RANK"] == "1":
        os._exit(9)
    return step(self, read, index, basis)

CompressionRun._compress_block = stop
shared_runs.work(sys.argv[1], sys.argv[2:])
"""
FAILS = """
import os
from rankfold import errors
from rankfold.calibration import runner
from rankfold.calibration.experts import STATISTICS

def fail(*_):
    raise errors.NumericsError("the third process fails")

if os.environ["RANK"] == "2":
    runner.ends = fail
from rankfold.cli import main
main()
"""
SENDS = """
import sys, shared_runs
from rankfold._utils import processes
from rankfold.compression import block

def told(owner, value):
    if owner == processes.process_index():
        print(sum(tensor.nbytes for tensor in processes._tensors(value)))

def broadcast(value, owner):
    told(owner, value)
    return of_dealt(value, owner)

def sent_by(owner, result):
    told(owner, result and result.state)
    return of_pieces(owner, result)

of_dealt, processes.broadcast = processes.broadcast, broadcast
of_pieces, block.sent_by = block.sent_by, sent_by
shared_runs.work(sys.argv[1], sys.argv[2:])
"""


def content(folder: Path) -> dict[str, bytes]:
    """All files of a checkpoint; of the record what does not tell of the machine."""
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    record = json.loads(found.pop(RECORD))
    for one in records_of(record):
        del one["run"]
    return found | {RECORD: json.dumps(record).encode()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    save_both(folder / BOTH)
    return folder


@pytest.fixture(scope="module")
def alone(place):
    codes, _, err = run(1, WORKER, str(place / "1"), *BASE, BOTH, folder=place / "1")
    assert codes == [0], err
    return place / "1"


@pytest.fixture(scope="module")
def stopped(place):
    """Exit codes of two processes, one of which ends in the middle of a compression."""
    codes, _, err = run(2, STOPS, str(place / "4"), STOPPED, folder=place / "4")
    return codes, err, [path.name for path in (place / "4" / f"{STOPPED}.partial").glob("block-*.json")]


@pytest.fixture(scope="module")
def shared(place, stopped):
    """Folders of what two and four processes compressed; four go on with what two have begun."""
    for count in (2, 4):
        codes, _, err = run(count, WORKER, str(place / str(count)), *BASE, BOTH, folder=place / str(count))
        assert codes == [0] * count, err
    return {count: place / str(count) for count in (2, 4)}


@pytest.mark.parametrize("name", [*BASE, BOTH])
def test_one_two_and_four_processes_write_the_same_bytes(alone, shared, name):
    expected = content(alone / name)
    for count, folder in shared.items():
        assert content(folder / name) == expected
        assert json.loads((folder / name / RECORD).read_text())["run"]["processes"] == count


def test_a_process_that_ends_ends_all_and_another_number_of_them_goes_on(stopped, alone, shared):
    codes, err, blocks = stopped
    assert codes[1] == 9 and codes[0] not in (0, None), "no process may wait for ever"
    assert "another process of this run has ended" in err
    assert sorted(blocks) == ["block-00000.json", "block-00001.json"]
    assert content(shared[4] / STOPPED) == content(alone / STOPPED)


@pytest.mark.matrix
def test_every_method_writes_the_same_bytes_where_shards_do_not_fall_evenly(place):
    for count in (1, 3):
        where = place / f"every-{count}"
        codes, _, err = run(count, WORKER, str(where), *EVERY, folder=where)
        assert codes == [0] * count, err
    for name in EVERY:
        assert content(place / "every-3" / name) == content(place / "every-1" / name), name


@pytest.mark.parametrize(("name", "part"), [("experts parallel", 1), ("latent experts", 1), ("reap", 0.01)])
def test_no_weight_of_an_expert_is_sent_twice(place, name, part):
    """Less is sent than is written of the blocks, norms and routers in it; only scores where no weight changes."""
    where = place / f"sent-{name}"
    codes, out, err = run(2, SENDS, str(where), name, folder=where)
    assert codes == [0, 0], err
    states = [load_file(path) for path in (where / name).glob("model-*.safetensors")]
    written = sum(t.nbytes for state in states for key, t in state.items() if ".layers." in key)
    sent = [int(line) for line in out.split("\n") if line.isdigit()]  # among what gloo of PyTorch 2.9 prints
    assert 0 < sum(sent) < part * written


@pytest.fixture(scope="module")
def files(place):
    """A model and a text."""
    return save_tiny(place / "model"), save_text(place / "text.txt")


def arguments(files, output: Path, command: str = "compress") -> list[str]:
    model, text = map(str, files)
    sizes = ["--num-samples", "8", "--max-length", "32", "--device", "cpu", "--shards", "4"]
    return [command, model, "-o", str(output), "--calibration", text, *sizes]


def test_moments_of_two_processes_are_those_of_one_and_any_number_takes_them(files, place):
    """The first process prints, once."""
    codes, out, err = run(2, RANKFOLD, *arguments(files, place / "moments-2", "calibrate"), folder=place / "calibrate")
    assert codes == [0, 0], err
    assert out.count("moments of 4 blocks") == 1
    source = open_model(files[0], device="cpu")
    data = rankfold.load_calibration(files[1], source, num_samples=8, max_length=32, shards=4)
    rankfold.calibrate(source, data, place / "moments-1")
    one, two = ({p.name: p.read_bytes() for p in (place / f"moments-{n}").iterdir()} for n in (1, 2))
    assert one == two
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    small = rankfold.compress(source, method=method, moments=place / "moments-2", output=place / "of-moments")
    again = rankfold.compress(source, method=method, calibration=data, mode="one-pass", output=place / "of-text")
    expected, found = (content(result.output) for result in (again, small))
    assert {k: v for k, v in found.items() if "safetensors" in k} == {
        k: v for k, v in expected.items() if "safetensors" in k
    }


def test_an_error_of_one_process_is_one_line_and_the_exit_code_of_all(files, place):
    """Methods stop a forward early, so each process comes to what fails in one of them."""
    line = [*arguments(files, place / "failed"), "--method", "modegpt", "--rank-multiple", "2"]
    codes, _, err = run(3, FAILS, *line, folder=place / "fails")
    assert codes == [2, 2, 2]
    assert [text for text in err.splitlines() if text.startswith("rankfold: ")] == ["rankfold: the third process fails"]
    assert "Traceback" not in err and not (place / "failed").exists()


def test_processes_that_search_for_a_quality_find_what_one_finds(files, place):
    """Every process adds up the seconds of the runs."""
    line = [*arguments(files, place / "kept-2"), "--method", "modegpt", "--keep-quality", "0.9", "--rank-multiple", "2"]
    codes, _, err = run(2, RANKFOLD, *line, folder=place / "keeps")
    assert codes == [0, 0], err
    source = open_model(files[0], device="cpu")
    data = rankfold.load_calibration(files[1], source, num_samples=8, max_length=32, shards=4)
    method = rankfold.MoDeGPT(rank_multiple=2)
    rankfold.compress(source, method=method, keep_quality=0.9, calibration=data, output=place / "kept-1")
    one, two = (content(place / f"kept-{n}") for n in (1, 2))
    assert {k: v for k, v in one.items() if "safetensors" in k} == {k: v for k, v in two.items() if "safetensors" in k}


def test_what_stops_a_write_of_the_first_process_is_said_though_the_others_wait(files, place):
    """An error in place of one that all raise would be exchanged again, with processes that have ended."""
    (place / "blocked.search").touch()
    line = [*arguments(files, place / "blocked"), "--method", "modegpt", "--keep-quality", "0.9"]
    codes, _, err = run(2, RANKFOLD, *line, folder=place / "blocks")
    assert codes == [2, 2] and f"rankfold: cannot write {place / 'blocked.search'}" in err


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [(["methods", "svd"], 0, "precondition="), (["compress", "nowhere", "--sparsity", "2"], 2, "sparsity")],
)
def test_what_cannot_be_shared_is_done_and_said_once(place, line, code, printed):
    codes, out, err = run(2, RANKFOLD, *line, folder=place / line[0])
    assert codes == [code, code]
    lines = [text for text in (out + err).splitlines() if printed in text]
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("samples", "shards", "count", "told"),
    [(3, 3, 1, "2 samples"), (8, 2, 3, "shards must be >= 3"), (8, 0, 1, "got 0")],
)
def test_shards_that_leave_a_process_without_work_are_refused(monkeypatch, samples, shards, count, told):
    monkeypatch.setattr(load, "process_count", lambda: count)
    with pytest.raises(OptionError, match=told):
        rankfold.load_calibration(some_ids(samples, 32), opened("llama"), num_samples=samples, shards=shards)


@pytest.mark.parametrize("shards", [1, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_shard_has_one_owner(monkeypatch, shards, count):
    owners = []
    for index in range(count):
        monkeypatch.setattr(processes, "_group", processes._Group(index, count, torch.device("cpu")))
        owners += [index for _ in processes.own_shards(shards)]
        owned = [shard for shard in range(shards) if processes.owner_of(shard, shards) == index]
        assert owned == list(processes.own_shards(shards))
    assert len(owners) == shards and owners == sorted(owners)


def test_pieces_of_a_step_are_dealt_where_every_process_can_have_their_moments(monkeypatch):
    """Other processes have neither stored moments nor gradients. What all share is sent by the first."""
    latent, narrow = (make_method(name, sparsity=0.3, rank_multiple=2) for name in ("latentllm", "modegpt"))
    inputs, scores = {"attention_input", "attention_output"}, {"query", "key", "query_key", "value"}
    measured, stored = HiddenStates(Stream([], [], None)), StoredMoments(MomentStore({}))
    fisher = replace(latent, precondition="fisher")
    monkeypatch.setattr(processes, "_group", processes._Group(1, 2, torch.device("cpu")))
    for family, method, expected, cases in (
        ("llama", latent, [inputs, {"mlp_input", "mlp_hidden"}], [(measured, [0, 1]), (stored, [0, 0])]),
        ("llama", fisher, [inputs, {"mlp_input", "mlp_hidden"}], [(measured, [0, 0])]),
        ("llama", narrow, [{"mlp_hidden"}, scores], [(measured, [0, 1]), (stored, [0, 0])]),
        ("mixtral", narrow, [STATISTICS, scores], [(measured, [0, 0])]),
    ):
        source = opened(family)
        view = source.block(0)
        ranks = {unit.module: unit.ranks[0] for unit in method.prunable_modules(view)}
        (step,) = method.stages(view, ranks)
        assert [piece.statistics for piece in step.pieces] == expected
        assert [bool(piece.shared) for piece in step.pieces] == [
            piece.statistics == STATISTICS for piece in step.pieces
        ]
        for provider, owners in cases:
            assert _owners(RunContext(source, method, provider, None, None, {}), view, step.pieces) == owners


def test_shards_sum_to_the_moments_of_the_whole():
    """All statistics of a block; every fifth row is kept, and these are the same ones."""
    source = opened("opt")
    view, ids = source.block(1), some_ids(61, 32)
    statistics = {"mlp_hidden", "attention_input", "mlp_samples", "absolute", "windows", "query_key", "influence"}
    one, many = (measure(view, start(source, ids, autocast=None, shards=n), statistics, step=True) for n in (1, 5))
    assert one.keys() == many.keys()
    for name, moment in one.items():
        assert moment.count == many[name].count
        for part in ("total", "absolute", "second", "rows", "windows"):
            whole, summed = getattr(moment, part), getattr(many[name], part)
            assert (whole is None) == (summed is None)
            if whole is not None:
                torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-5, msg=f"{name}.{part}")


def test_sums_of_windows_of_several_lengths_count_them_by_the_mean_length_of_all():
    source = opened("llama")
    rows = [some_ids(1, length, seed=length)[0] for length in (8, 24, 12, 30, 16)]
    data = rankfold.load_calibration(rows, source, num_samples=5).ids
    view = source.block(0)
    one, many = (
        measure(view, start(source, data, autocast=None, shards=n), {"mlp_input", "windows"}, step=False)["mlp_input"]
        for n in (1, 3)
    )
    torch.testing.assert_close(many.windows, one.windows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(many.within_windows(), one.within_windows())


def test_more_shards_than_samples_leave_some_empty():
    """Held-out samples are few."""
    source = opened("llama")
    stream = start(source, some_ids(2, 16), autocast=None, shards=5)
    assert [list(shard.batches) for shard in stream.shards] == [[0], [1]]
    assert [shard.first for shard in stream.shards] == [0, 16]
    assert sum_shards([], is_shared=True) == {}


def test_shards_leave_ranks_and_weights_nearly_as_they_are():
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    one, four = (
        rankfold.compress(opened("llama"), method=method, calibration=replace(tokens(), shards=n)) for n in (1, SHARDS)
    )
    assert "shards" not in one.record["calibration"] and four.record["calibration"]["shards"] == SHARDS
    assert [m.rank for m in one.plan.modules] == [m.rank for m in four.plan.modules]
    theirs = four.model.state_dict()
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_predictions_are_compared_in_whole_copies_however_small_a_batch_is(monkeypatch):
    """Trials run side by side, in batches of copies of the text, which is longer than a batch may be here."""
    method, data = rankfold.Rankfold(sparsity=0.3, rank_multiple=2), tokens()
    expected = rankfold.compress(opened("llama"), method=method, calibration=data)
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)
    monkeypatch.setattr(kl_divergence, "batch_tokens", lambda source: 48)
    found = rankfold.compress(opened("llama"), method=method, calibration=data)
    assert [m.rank for m in found.plan.modules] == [m.rank for m in expected.plan.modules]


def test_logits_of_few_positions_are_held_at_once(monkeypatch):
    """A batch of an accelerator has many windows, and a vocabulary is large."""
    source, rows, plain = opened("llama"), [], runner.outputs_at

    def watched(source, ids, stream, hidden, positions):
        rows.append(len(hidden) * len(positions))
        return plain(source, ids, stream, hidden, positions)

    monkeypatch.setattr(runner, "outputs_at", watched)
    ids = some_ids(40, 32)
    stream = start(source, ids, autocast=None)
    losses = token_losses(source, ids, stream)
    assert len(losses) == 40 and max(rows) <= 256


def test_data_in_memory_says_what_it_is_cut_into():
    data = CalibrationData(some_ids(4, 8), "t", "t", 0, shards=2)
    assert data.describe()["shards"] == 2
