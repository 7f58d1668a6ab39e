"""A quality or a size in place of a sparsity: what was asked for is what came out."""

import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rankfold
from families import opened, tokens
from rankfold import pipeline, quality
from rankfold.errors import CheckpointError, DataError, OptionError, UnsupportedModelError
from rankfold.report.goal import asked_and_got, goal_line
from tiny_encoders import opened_encoder
from trained import calibration, trained, with_held_out

FINE = {"rank_multiple": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    source = rankfold.open_model(trained("qwen2", shared), device="cpu")
    source.autocast = None
    return source


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("method", ["rankfold", "modegpt"])
def test_the_quality_asked_for_is_kept_and_little_more(source, method):
    data = with_held_out(calibration())
    found = rankfold.compress(source, keep_quality=0.9, calibration=data, method=method, **FINE)
    goal, held_out = found.record["goal"], found.record["held_out"]
    assert goal["got"] == pytest.approx(held_out["perplexity_dense"] / held_out["perplexity"])
    assert 0.9 <= goal["got"] < 0.95 and goal["asked"] == 0.9 and len(goal["earlier_runs"]) < 4
    assert (goal["predicted"] is None) == (method == "modegpt" and not goal["earlier_runs"])
    line = goal_line(found.record) or ""
    assert f"got {goal['got']:.4f}" in line and f"search took {goal['search_seconds']:.1f} s" in line
    tried = {run["sparsity"] for run in goal["earlier_runs"] + goal["later_runs"]}
    assert found.plan.method["sparsity"] not in tried
    assert asked_and_got(found.record) == line.partition(";")[0]  # which the model card has
    assert len(tried) < 4 and all(f"at sparsity {run:g}" in line for run in tried)
    own = found.record["run"]["seconds"]["total"]
    assert goal["search_seconds"] > own * (1 + len(tried)) / 2  # every run is in it
    again = rankfold.compress(source, found.plan.method["sparsity"], calibration=data, method=method, **FINE)
    assert same_weights(found.model, again.model) and "goal" not in again.record


def test_a_killed_search_goes_on_and_leaves_one_folder(source, tmp_path, tmp_path_factory, monkeypatch):
    data, output = with_held_out(calibration()), tmp_path / "small"
    how = {"keep_quality": 0.6, "calibration": data, "method": "modegpt", "mode": "one-pass", "output": output, **FINE}
    whole, calls = pipeline.compress, []

    def killed(*args, **options):
        calls.append(options["goal"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(pipeline, "compress", killed)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(source, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["small.search"]
    first = len(calls)
    shutil.copytree(tmp_path, beside := tmp_path_factory.mktemp("beside"), dirs_exist_ok=True)
    nearly = rankfold.compress(source, **{**how, "keep_quality": 0.6000001, "output": beside / "small"})
    assert nearly.record["goal"]["asked"] == calls[first].asked == 0.6000001 and not calls[first].earlier_runs
    first = len(calls)
    found = rankfold.compress(source, **how)
    assert calls[first].earlier_runs and [path.name for path in tmp_path.iterdir()] == [
        "small"
    ]  # the first one is read
    assert found.output == output and same_weights(found.model, rankfold.load(output, device="cpu"))
    record = json.loads((output / "rankfold.json").read_text())
    assert record["goal"] == found.record["goal"] and record["goal"]["got"] >= 0.6


def test_of_two_runs_for_one_output_the_second_is_refused(source, tmp_path):
    """Whatever it asks for: the search that ends first would remove the runs of another one."""
    how = {"calibration": with_held_out(calibration()), "method": "modegpt", "output": tmp_path / "small", **FINE}

    def begin_another(plan):
        for other in ({"keep_quality": 0.9}, {"sparsity": 0.3}):
            with pytest.raises(CheckpointError, match=f"small is being written by process {os.getpid()}"):
                rankfold.compress(source, **how, **other)

    rankfold.compress(source, keep_quality=0.6, **how, on_plan=begin_another)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_plan_is_that_of_the_first_run(source):
    data = with_held_out(calibration())
    plan = rankfold.plan(source, keep_quality=0.8, calibration=data, **FINE)
    more = rankfold.plan(source, keep_quality=0.5, calibration=data, **FINE)
    assert 0 < plan.sparsity < more.sparsity
    curve = quality.loss_curve(source, rankfold.Rankfold(**FINE), data)
    asked = plan.method["sparsity"]
    assert curve(asked) == pytest.approx(-0.9 * math.log(0.8), rel=0.05)
    assert curve(0.3) < curve(0.6) < curve(0.8)  # and after the end of what was measured
    with pytest.raises(OptionError, match="keep_quality=0.8 is predicted on the curves of allocation measured"):
        rankfold.plan(source, keep_quality=0.8, method="modegpt", calibration=data)
    with pytest.raises(OptionError, match="got greedy"):  # which measures, but no curves
        rankfold.plan(source, keep_quality=0.8, method="sleb", calibration=data)


def test_what_no_sparsity_keeps_is_said(source, tmp_path):
    data = with_held_out(calibration())
    with pytest.raises(
        OptionError, match=r"keep_quality=0.999999 is not kept at any sparsity from 0.005 on that was tried"
    ):
        rankfold.compress(source, keep_quality=0.999999, calibration=data, method="svd", output=tmp_path / "small")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"sparsity": 0.3, "keep_quality": 0.9}, OptionError, "sparsity and keep_quality each say how much"),
        ({"target_size": 100, "keep_quality": 0.9}, OptionError, "target_size and keep_quality each say how much"),
        ({"keep_quality": 1.0}, OptionError, r"keep_quality must be in \(0, 1\), got 1.0"),
        (
            {"keep_quality": 0.9, "modules": {"mlp": 0.3}},
            OptionError,
            "chooses one sparsity, and modules have their own",
        ),
        (
            {"keep_quality": 0.9, "calibration": replace(tokens(), held_out=None)},
            DataError,
            "held-out calibration samples",
        ),
        ({"target_size": "1TB"}, OptionError, "and those of .* take .*; give a smaller size"),
        (
            {"target_size": "9B"},
            OptionError,
            r"target_size 9 bytes of .* cannot be reached: the chosen modules can lose at most",
        ),
        (
            {"target_size": "60kB", "budget": "flops"},
            OptionError,
            "target_size is a budget of its own, so budget flops",
        ),
        (
            {"target_size": "60kB", "modules": {"mlp": 0.3}},
            OptionError,
            "so sparsities of single modules would have no effect",
        ),
        *[
            (
                {"target_size": "60kB", "method": method},
                OptionError,
                rf"target_size chooses ranks by bytes, and method {re.escape(method)} does not; give sparsity",
            )
            for method in ("basis-sharing", "slicegpt+modegpt", "wanda")
        ],
    ],
)
def test_what_does_not_go_together_is_one_line(options, kind, message):
    with pytest.raises(kind, match=message):
        rankfold.compress(opened("llama"), **{"calibration": tokens(), **options})


def test_an_encoder_predicts_nothing():
    with pytest.raises(UnsupportedModelError, match="of the likelihood of tokens, and bert predicts none"):
        rankfold.compress(opened_encoder("bert"), keep_quality=0.9, calibration=tokens())


@pytest.mark.parametrize("method", ["rankfold", "latentllm"])
def test_all_weights_take_no_more_than_the_size_asked_for_and_one_step_less(method, tmp_path):
    source = opened("llama")
    size = int(0.8 * 4 * sum(p.numel() for p in source.model.parameters()))
    how = {"calibration": tokens(), "method": method, "rank_multiple": 2, "output": tmp_path / "small"}
    found = rankfold.compress(source, target_size=size, **how)
    files = [load_file(path) for path in found.output.glob("*.safetensors")]
    taken = sum(tensor.numel() * tensor.element_size() for file in files for tensor in file.values())
    assert 0.95 * size < taken <= size
    assert found.record["goal"] == {
        **{"option": "target_size", "asked": size, "predicted": None},
        **{"got": taken, "earlier_runs": []},
    }
    assert (found.plan.method["scope"], found.plan.method["budget"]) == ("model", "bytes:context=2048,batch=0")
