"""How fast a recovery learns where nobody says it."""

import copy
import math

import pytest
import torch
from torch import nn

import rankfold
from families import some_ids, tiny_model
from rankfold.recovery import blockwise, whole
from rankfold.recovery.rate import CHANGE, FIRST, TIMES, measured_rate, rate_by_size

SMALL = {"tokens": 64, "max_length": 16, "batch_tokens": 32, "device": "cpu"}


def likelihoods(model, ids) -> torch.Tensor:
    found = model(ids).logits[:, :-1].double().log_softmax(-1)
    return found.gather(-1, ids[:, 1:, None]).flatten()


def divergence(model, teacher, ids) -> torch.Tensor:
    mine, theirs = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, teacher))
    return (theirs.exp() * (theirs - mine)).sum(-1).mean()


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_a_step_of_it_changes_predictions_by_so_much(scale):
    """By a gradient and a step of our own; weights of another size, which change more, learn at another rate."""
    model, teacher = tiny_model("llama", seed=1), tiny_model("llama")
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(scale)
    text, unseen = some_ids(16, 16), some_ids(4, 16, seed=3)
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())

    def losses():
        with torch.no_grad():
            return -likelihoods(model, unseen)

    rate = measured_rate(model, "all", lambda: divergence(model, teacher, text).backward(), losses)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    divergence(model, teacher, text).backward()
    with torch.no_grad():
        dense = likelihoods(model, unseen)
        for p in model.model.layers.parameters():
            p -= rate / TIMES["all"] * p.grad.sign()
        change = (likelihoods(model, unseen) - dense).square().mean().sqrt().item()
    assert change == pytest.approx(CHANGE, rel=0.1)


def test_it_does_not_depend_on_how_a_function_is_written():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def rate(factor: float) -> float:
        layer = nn.Linear(8, 1, bias=False)
        layer.weight.data = torch.linspace(-1, 1, 8)[None] / factor
        return measured_rate(
            layer,
            "all",
            lambda: (factor * layer(x) - 1).square().mean().backward(),
            lambda: (factor * layer(x.flip(0))).detach(),
        )

    assert rate(1.0) == pytest.approx(100 * rate(100.0), rel=0.05)


def test_a_model_that_predicts_what_the_dense_one_does_has_a_rate():
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.constant_(layer.bias, 0.5)
    rate = measured_rate(layer, "norms", lambda: (0 * layer(torch.ones(1, 4)).sum()).backward(), lambda: torch.zeros(3))
    assert rate == pytest.approx(TIMES["norms"] * FIRST * 0.5)


def test_norms_that_are_offsets_from_one_have_a_rate(tmp_path):
    for name, seed in (("dense", 0), ("small", 1)):  # of Gemma 2, whose norms begin at 0
        tiny_model("gemma2", seed=seed, blocks=1).save_pretrained(tmp_path / name)
    for how in ({}, {"blockwise": True, "output": tmp_path / "out"}):
        given = (tmp_path / "small", tmp_path / "dense")
        result = rankfold.recover(*given, calibration=some_ids(16, 16), tune="norms", **SMALL, **how)
        assert result.record["recovery"]["tune"] == "norms"


@pytest.mark.parametrize("tune", ["all", "lora", "lora-mlp", "norms"])
def test_it_is_in_the_record_and_what_is_named_is_taken(tune):
    def rate(**options) -> float:
        result = rankfold.recover(
            tiny_model("llama", seed=1),
            tiny_model("llama"),
            calibration=some_ids(16, 16),
            tune=tune,
            **SMALL,
            **options,
        )
        return result.record["recovery"]["lr"]

    assert rate() > 0 and rate() == rate()
    assert rate(lr=3e-4) == 3e-4


def test_a_killed_run_goes_on_with_the_rate_that_it_began_with(monkeypatch, tmp_path):
    for name, seed in (("dense", 0), ("small", 1)):
        tiny_model("llama", seed=seed).save_pretrained(tmp_path / name)
    given = (tmp_path / "small", tmp_path / "dense")
    common = {"calibration": some_ids(16, 16), "output": tmp_path / "out", **SMALL}

    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(whole.Distiller, "training_step", kill)
        with pytest.raises(Killed):
            rankfold.recover(*given, **common)
    whole_run = rankfold.recover(*given, **{**common, "output": tmp_path / "other"})
    monkeypatch.setattr(whole, "measured_rate", None)
    assert rankfold.recover(*given, **common).record["recovery"]["lr"] == whole_run.record["recovery"]["lr"]


def median_size(weights: list[torch.Tensor]) -> float:
    return sorted(math.sqrt(w.detach().double().pow(2).mean()) for w in weights)[(len(weights) - 1) // 2]


def test_block_by_block_it_is_a_fraction_of_the_median_size_of_the_matrices():
    weights = [scale * torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) for scale in (0.1, 0.2, 40.0)]
    assert rate_by_size(0.01, [*weights, torch.full((8,), 1e6)]) == pytest.approx(0.01 * 0.2, rel=0.05)
    assert rate_by_size(0.01, [10 * w for w in weights]) == pytest.approx(0.1 * 0.2, rel=0.05)
    assert rate_by_size(0.01, [torch.full((8,), 3.0)]) == 0.03  # vectors alone
    assert rate_by_size(1.0, [torch.full((2, 2), 0.0123456)]) == 0.012  # of two digits


def test_block_by_block_every_part_has_its_own(monkeypatch, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    model = tiny_model("llama", seed=1)
    with torch.no_grad():
        for parameter in model.model.layers[1].mlp.parameters():
            parameter.mul_(10)
    model.save_pretrained(tmp_path / "small")
    rates, plain = [], torch.optim.AdamW

    def adamw(weights: list[nn.Parameter], lr: float, **others):
        rates.append((lr, median_size([w for w in weights if w.dim() == 2])))
        return plain(weights, lr, **others)

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    common = {"calibration": some_ids(16, 16), "output": tmp_path / "out", "blockwise": True, **SMALL}
    found = rankfold.recover(tmp_path / "small", tmp_path / "dense", **common)
    assert found.record["recovery"]["lr"] is None
    assert all(lr == pytest.approx(blockwise.RELATIVE_RATES["all"] * size, rel=0.1) for lr, size in rates)
    assert max(lr for lr, _ in rates) > 5 * min(lr for lr, _ in rates)
