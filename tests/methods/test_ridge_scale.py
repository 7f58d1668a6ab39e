"""An absolute ridge is lambda on the sum over calibration tokens: the paper's leverage scores, for any number."""

import pytest
import torch

import rankfold
from families import opened, tokens
from rankfold import MoDeGPT
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
