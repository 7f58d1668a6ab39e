"""An absolute ridge is lambda on the sum over calibration tokens: the paper's leverage scores, for any number."""

import pytest
import torch

import rankfold
from activations import blocks_of
from families import opened, tokens
from rankfold import MoDeGPT, Rankfold
from rankfold._utils.files import read_json


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(("family", "bias_refit"), [("llama", False), ("opt", False), ("opt", True)])
def test_the_scores_are_those_of_lambda_on_the_sum(family, bias_refit, rows, tmp_path):
    source, lam = opened(family), 3.0
    store = rankfold.calibrate(source, tokens(rows), statistics={"mlp_hidden"})
    options = {"selection": "leverage", "modules": ("mlp",), "bias_refit": bias_refit, "sparsity": 0.3}
    method = MoDeGPT(**options, ridge=lam, ridge_scale="absolute")
    folder = rankfold.compress(source, method=method, output=tmp_path / "small", moments=store).output
    for index, report in read_json(folder / "rankfold.json")["blocks"].items():
        moment = store[int(index)]["mlp_hidden"]
        C = moment.covariance() * moment.count if bias_refit else moment.second.double()
        scores = (C @ torch.linalg.inv(C + lam * torch.eye(len(C), dtype=C.dtype))).diagonal()
        dropped = scores.sort().values[: report["mlp"]["of"] - report["mlp"]["rank"]].sum().item()
        assert report["mlp"]["epsilon"] == pytest.approx(dropped, rel=1e-4)


def test_of_what_attention_sends_it_is_the_same_fraction():
    source, options = opened("llama"), {"modules": {"vo": 0.4}, "rank_multiple": 2, "residual_correction": False}
    sent = rankfold.calibrate(source, tokens(), statistics={"attention_output"})[0]["attention_output"].second
    lam = 0.1 * sent.diagonal().mean().item()
    found = []
    for given in ({"ridge": 0.1}, {"ridge": lam, "ridge_scale": "absolute"}, {"ridge": 1e-4}):
        small = rankfold.compress(
            source, method=Rankfold(allocation="uniform", **options, **given), calibration=tokens()
        ).model
        found.append(blocks_of(small)[0].self_attn.o_proj.weight)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
