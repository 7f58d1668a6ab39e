"""Training that several processes share: the numbers of one process, a process that ends, and errors of one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rankfold
import tiny_pairs
from families import opened, tiny_model
from rankfold._utils import processes
from rankfold.errors import OptionError
from rankfold.recovery.options import check_device
from rankfold.recovery.training import AT_ONCE, arguments, reaches_all, sequences_of_step
from rankfold.recovery.tuning import prepared
from shared_recoveries import CASES, OWN, SCORES, STEPS, WORKER, save_all, save_own
from shared_runs import run
from warm import RANKFOLD

STOPPED = STEPS // 2 + 1  # one step after a checkpoint
STOPS = f"""
import os, sys, shared_recoveries
from rankfold.recovery.training import Distiller
step = Distiller.training_step

def stop(self, *inputs, **options):
    if self.state.global_step == {STOPPED} and os.environ["RANK"] == "1":
        os._exit(9)
    return step(self, *inputs, **options)

Distiller.training_step = stop
shared_recoveries.work(sys.argv[1], sys.argv[2:])
"""
FAILS = """
import os, accelerate
from rankfold import errors
from rankfold.recovery import training

def fail(*inputs, **options):
    raise errors.NumericsError("the second process fails")

if os.environ["RANK"] == "1":
    {what} = fail
from rankfold.cli import main
main()
"""
DIVERGES = """
import itertools, os
from rankfold.recovery import training
plain, calls = training.training_loss, itertools.count()

def lose(*inputs, **options):
    return plain(*inputs, **options) * (float("nan") if next(calls) == 1 and os.environ["RANK"] == "1" else 1.0)

training.training_loss = lose
from rankfold.cli import main
main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recoveries")
    save_all(folder)
    return folder


def trained(place: Path, count: int, name: str, code: str = WORKER, folder: str | None = None) -> Path:
    """What so many processes make of a case."""
    where = place / (folder or f"{name}-{count}")
    codes, _, err = run(count, code, str(where), name, folder=where)
    assert codes == [0] * count, err
    return where / name


@pytest.fixture(scope="module")
def alone(place):
    return trained(place, 1, "all")


def facts_of(output: Path) -> dict:
    files = (output / name for name in ("recovery.json", "rankfold.json"))
    return json.loads(next(path for path in files if path.exists()).read_text())["recovery"]


def assert_alike(found: Path, expected: Path, *, routed: bool = False) -> None:
    """Losses on held-out text at every score to 1e-4 nats, and the weights.

    Args:
        routed: a router chooses one expert a token, so that near ties may go elsewhere: losses to 2e-3 nats alone.
    """
    theirs, mine = facts_of(expected), facts_of(found)
    assert [mine[key] for key in ("recovered", "tokens_seen")] == [theirs[key] for key in ("recovered", "tokens_seen")]
    assert [one["step"] for one in mine["history"]] == [one["step"] for one in theirs["history"]]
    for one, other in zip(mine["history"], theirs["history"], strict=True):
        assert one["nats"] == pytest.approx(other["nats"], abs=2e-3 if routed else 1e-4)
    if routed:
        return
    weights = rankfold.load(expected, device="cpu").state_dict()
    for name, weight in rankfold.load(found, device="cpu").state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-3, msg=name)


def test_two_processes_train_as_one_does(place, alone):
    assert_alike(trained(place, 2, "all"), alone)
    assert facts_of(alone)["recovered"] and len(facts_of(alone)["history"]) == SCORES + 1


def test_a_process_that_ends_ends_all_and_one_alone_goes_on(place, alone):
    where = place / "stopped"
    codes, _, err = run(2, STOPS, str(where), "all", folder=where)
    assert codes[1] == 9 and codes[0] not in (0, None), "no process may wait for ever"
    assert "another process of this run has ended" in err
    assert (where / "all.partial").exists()
    assert_alike(trained(place, 1, "all", folder="stopped"), alone)


def command(place: Path, output: str, *more: str) -> list[str]:
    sizes = ["--tokens", "1024", "--max-length", "32", "--batch-tokens", "256", "--device", "cpu"]
    models = [str(place / "small"), "-o", str(place / output), "--teacher", str(place / "dense")]
    return ["recover", *models, "--calibration", str(place / "text.txt"), *sizes, *more]


def said_by(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("rankfold: ")]


def test_an_error_of_one_process_is_one_line_and_the_exit_code_of_all(place):
    code = FAILS.format(what="training.training_loss")
    codes, _, err = run(2, code, *command(place, "failed"), folder=place / "fails")
    assert codes == [2, 2]
    assert said_by(err) == ["rankfold: the second process fails"] and "Traceback" not in err
    assert not (place / "failed").exists()


@pytest.mark.matrix
def test_an_error_in_a_backward_pass_ends_those_who_wait_for_gradients(place):
    code = FAILS.format(what="accelerate.Accelerator.backward")
    codes, _, err = run(2, code, *command(place, "failed"), folder=place / "backward")
    assert codes == [2, 2]
    (line,) = said_by(err)
    assert line.startswith("rankfold: another process of this run has ended")
    assert "the second process fails" in err.splitlines() and "Traceback" not in err


@pytest.mark.matrix
def test_a_loss_of_one_process_that_is_not_finite_stops_all_at_once(place):
    codes, _, err = run(2, DIVERGES, *command(place, "diverged", "--lr", "2e-4"), folder=place / "diverges")
    assert codes[0] == codes[1] and codes[0] in (0, 3), err
    assert err.count("the loss is not finite") == 1
    assert facts_of(place / "diverged")["steps"] == 2


def test_blocks_are_trained_in_one_process(place):
    codes, _, err = run(2, RANKFOLD, *command(place, "refused", "--blockwise"), folder=place / "blockwise")
    assert codes == [2, 2]
    assert said_by(err) == [
        "rankfold: --blockwise trains in one process, got 2; give the command without torchrun or accelerate launch, "
        "or leave it out"
    ]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "2 processes run this script, and only those of a command train together",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate is set to FSDP; .* or unset ACCELERATE_USE_FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate is set to DEEPSPEED"),
    ],
)
def test_what_trainer_would_read_from_the_environment_is_refused(place, monkeypatch, environment, told):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=told):
        rankfold.recover(place / "small", place / "dense", calibration=place / "text.txt")


def as_one_of(monkeypatch, count: int, device: str = "cpu") -> None:
    monkeypatch.setattr(processes, "_group", processes._Group(0, count, torch.device(device)))


def test_a_model_is_where_its_process_exchanges_gradients(monkeypatch):
    model = opened("llama").model
    as_one_of(monkeypatch, 2)
    check_device(model)
    as_one_of(monkeypatch, 2, "cuda:1")
    with pytest.raises(
        OptionError, match="on cuda:1, and the model is on cpu; give device='cuda', or set ACCELERATE_USE_CPU=1"
    ):
        check_device(model)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [512, 1024])
def test_processes_share_the_sequences_of_a_step(tmp_path, monkeypatch, count, length):
    as_one_of(monkeypatch, count)
    batch = sequences_of_step(16384, length)
    assert batch == 16384 // length
    args = arguments(tmp_path, steps=9, batch=batch, length=length, every=1, device=torch.device("cpu"), keep=False)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * count == batch
    assert args.per_device_train_batch_size * length <= AT_ONCE


def test_a_step_that_processes_cannot_share_evenly_is_refused(monkeypatch):
    told = "batch_tokens={} is a step of {} sequences of 512 tokens, which {} processes cannot share evenly; give {}"
    for count, allowed in ((3, "batch_tokens=1536 or batch_tokens=3072"), (8, "batch_tokens=4096")):
        as_one_of(monkeypatch, count)
        with pytest.raises(OptionError) as refused:
            sequences_of_step(2048, 512)
        assert str(refused.value) == told.format(2048, 4, count, allowed)


@pytest.mark.parametrize(("family", "expected"), [("llama", True), ("gpt_oss", True), ("llava", False)])
def test_one_token_reaches_all_weights_but_those_that_see_images(family, expected):
    """Where it does, DDP need not look for weights without a gradient."""
    model = tiny_pairs.tiny_model(family) if family == "llava" else tiny_model(family)
    network = prepared(model, "all", 1, 0)
    assert reaches_all(network, model.get_decoder()) is expected
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in CASES if name != "all"])
def test_what_is_trained_is_the_same_in_two_processes(place, name):
    if name in OWN:
        save_own(place, name)
    two, one = (trained(place, count, name) for count in (2, 1))
    if name == "adapter":
        for key, weight in load_file(two / "adapter_model.safetensors").items():
            torch.testing.assert_close(weight, load_file(one / "adapter_model.safetensors")[key], rtol=0, atol=1e-3)
        return
    assert_alike(two, one, routed=name == "experts")
    if name == "sparse":
        before = dict(rankfold.load(place / "sparse" / "small", device="cpu").named_parameters())
        for key, weight in rankfold.load(two, device="cpu").named_parameters():
            assert "proj" not in key or torch.equal(weight == 0, before[key] == 0), key


@pytest.mark.matrix
def test_two_processes_compress_and_recover(place):
    line = f"compress {place / 'dense'} -o {place / 'both'} --calibration {place / 'text.txt'} --num-samples 8"
    line += " --max-length 32 --method modegpt --rank-multiple 2 --device cpu --recover 1s"
    codes, out, err = run(2, RANKFOLD, *line.split(), folder=place / "compress")
    assert codes[0] == codes[1] and codes[0] in (0, 3), err
    assert out.count("towards the predictions of dense") == 1
    assert [path.name for path in place.glob("both*")] == ["both"]
    assert rankfold.load(place / "both", device="cpu") is not None
