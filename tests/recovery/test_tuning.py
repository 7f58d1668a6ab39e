"""How fast a recovery learns where nobody says it."""

import math

import pytest
import torch
from torch import nn

import rankfold
from families import some_ids, tiny_model
from rankfold.recovery import blockwise
from rankfold.recovery.tuning import RELATIVE_RATES, learning_rate

SMALL = {"tokens": 64, "max_length": 16, "batch_tokens": 32, "device": "cpu"}


def median_size(weights: list[torch.Tensor]) -> float:
    return sorted(math.sqrt(w.detach().double().pow(2).mean()) for w in weights)[(len(weights) - 1) // 2]


def test_it_is_a_fraction_of_the_median_size_of_the_matrices():
    weights = [scale * torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) for scale in (0.1, 0.2, 40.0)]
    assert learning_rate(0.01, [*weights, torch.full((8,), 1e6)]) == pytest.approx(0.01 * 0.2, rel=0.05)
    assert learning_rate(0.01, [10 * w for w in weights]) == pytest.approx(0.1 * 0.2, rel=0.05)
    assert learning_rate(0.01, [torch.full((8,), 3.0)]) == 0.03  # vectors alone
    assert learning_rate(1.0, [torch.full((2, 2), 0.0123456)]) == 0.012  # of two digits


@pytest.mark.parametrize("tune", ["all", "lora", "lora-mlp", "norms"])
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_model_with_smaller_weights_learns_more_slowly(tune, scale):
    model = tiny_model("llama", seed=1)
    blocks = model.model.layers
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.mul_(scale)
    norms = [m.weight for m in model.modules() if "Norm" in type(m).__name__]
    matrices = [p for p in blocks.parameters() if p.dim() == 2]
    matrices += [] if model.config.tie_word_embeddings else [model.lm_head.weight]
    recovery = rankfold.recover(model, tiny_model("llama"), calibration=some_ids(16, 16), tune=tune, **SMALL).record[
        "recovery"
    ]
    expected = RELATIVE_RATES[tune] * median_size(norms if tune == "norms" else matrices)
    assert recovery["lr"] == pytest.approx(expected, rel=0.05)


def test_what_is_named_is_taken():
    named = rankfold.recover(
        tiny_model("llama", seed=1), tiny_model("llama"), calibration=some_ids(16, 16), lr=3e-4, **SMALL
    )
    assert named.record["recovery"]["lr"] == 3e-4


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
    found = rankfold.recover(
        tmp_path / "small",
        tmp_path / "dense",
        calibration=some_ids(16, 16),
        output=tmp_path / "out",
        blockwise=True,
        **SMALL,
    )
    assert found.record["recovery"]["lr"] is None
    assert all(lr == pytest.approx(blockwise.RELATIVE_RATES["all"] * size, rel=0.05) for lr, size in rates)
    assert max(lr for lr, _ in rates) > 5 * min(lr for lr, _ in rates)
