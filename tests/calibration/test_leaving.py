"""A forward is left as soon as all that is wanted has been seen, and what was measured is the same."""

import pytest
import torch
from torch import nn

from families import opened, some_ids
from rankfold.calibration.leaving import BehindAll, Left, watched
from rankfold.calibration.runner import attend, measure, start
from rankfold.calibration.statistics import STATISTICS, last_place
from tiny_encoders import ENCODERS, opened_encoder

PROJECTED = {"attention_input", "query", "key", "key_spread", "query_key", "value"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox", "falcon-gqa", "gpt2", "bloom", "bert", "opt"])
def test_queries_keys_and_values_are_measured_without_attention(family, monkeypatch):
    source = opened_encoder(family) if family in ENCODERS else opened(family)
    stream, ran = start(source, some_ids(4, 16), autocast=None), []
    view = source.block(0)
    handle = view.attention.output_module.register_forward_pre_hook(lambda *_: ran.append("output"))
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: ran.append("sdpa") or plain(*a, **k)
    )
    left = measure(view, stream, PROJECTED, step=False)
    assert not ran
    whole = measure(view, stream.copy(), PROJECTED, step=True)
    handle.remove()
    assert "output" in ran
    assert left.keys() == whole.keys() == PROJECTED
    for name in PROJECTED:
        assert torch.equal(left[name].second, whole[name].second) and left[name].count == whole[name].count, name


def test_a_forward_goes_as_far_as_the_last_of_all_statistics_wants():
    assert last_place({"query", "attention_input", "windows", "absolute", "norms_after"}) == "projections"
    assert last_place({"query", "attention_output"}) == "attention"
    assert last_place({"mlp_hidden", "query"}) == "mlp"
    assert last_place({"influence", "mlp_hidden"}) == last_place({"windows"}) == last_place(set()) == "end"
    assert {last_place([name]) for name in STATISTICS} == {"projections", "attention", "mlp", "end"}


class Block(nn.Module):
    """Three layers in a row, of which the second may not run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.order = [0, 1, 2, 3]
        self.ran: list[int] = []

    def forward(self, x):
        for place in self.order:
            x = self.layers[place](x)
            self.ran.append(place)
        return x


@pytest.mark.parametrize(
    "order, left_behind", [([0, 1, 2, 3], 2), ([2, 0, 1, 3], 1), ([0, 0, 2, 1, 3], 1), ([0, 2, 3], None)]
)
def test_a_block_is_left_behind_the_last_of_some_layers_in_whatever_order_they_run(order, left_behind):
    block = Block()
    with watched(BehindAll(block, block.layers[:3])):
        for now in ([0, 2], order, order):  # what did not run in one forward is waited for in the next one
            block.order, block.ran = now, []
            try:
                block(torch.zeros(1, 2))
            except Left:
                assert now == order and len(block.ran) == order.index(left_behind)  # the hook ends its own layer
            else:
                assert now != order or left_behind is None
                assert block.ran == now
    block.order, block.ran = order, []
    block(torch.zeros(1, 2))
    assert block.ran == order  # the hooks are gone


def test_attention_runs_as_far_as_it_mixes_and_the_stream_stays():
    source = opened("llama")
    stream, ran = start(source, some_ids(2, 8), autocast=None), []
    view, before = source.block(0), [x.clone() for x in stream.hidden]
    view.attention.module.q_proj.register_forward_hook(lambda *_: ran.append("q"))
    view.attention.output_module.register_forward_hook(lambda *_: ran.append("o"))
    attend(view, stream)
    assert ran == ["q"] * len(before)
    assert all(torch.equal(a, b) for a, b in zip(before, stream.hidden, strict=True))
