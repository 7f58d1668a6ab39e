"""Numbers that only a trial makes too large are not said to be the dense model's."""

import contextlib

import pytest
import torch

import rankfold
from families import opened, some_ids, tiny_model, tokens
from rankfold.calibration.runner import advance, start
from rankfold.compression import kl_divergence
from rankfold.errors import NumericsError

TOLD = "^the dense model with a single module compressed computes NaN or infinity, and by itself it does not; give"


def test_predictions_of_a_trial():
    source = rankfold.open_model(tiny_model("llama").half(), device="cpu")
    stream = start(source, some_ids(), autocast=torch.bfloat16)
    for index in range(len(source)):
        advance(source.block(index), stream)
    tried = stream.copy()
    tried.hidden = [hidden * 1e6 for hidden in stream.hidden]  # beyond what fp16 holds, as norm and head take it
    with pytest.raises(NumericsError, match=TOLD):
        kl_divergence._divergences(source, some_ids(), stream, tried)


def test_the_block_with_a_module_tried(monkeypatch):
    @contextlib.contextmanager
    def spoiled(view, *_):
        before = view.mlp.down.weight.data.clone()
        view.mlp.down.weight.data.fill_(torch.inf)
        yield
        view.mlp.down.weight.data.copy_(before)

    monkeypatch.setattr(kl_divergence, "replaced", spoiled)
    with pytest.raises(NumericsError, match=TOLD):
        rankfold.compress(opened("llama"), 0.3, calibration=tokens(), rank_multiple=2)
