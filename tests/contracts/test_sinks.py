"""Attention sinks: a score of every head that is nobody's, so that the shares of the tokens add up to less than one."""

import pytest
import torch

import rankfold
from families import opened, some_ids, tokens
from rankfold import LatentLLM, MoDeGPT, Rankfold
from rankfold.calibration.runner import measure, start
from rankfold.compression.block import decompose
from rankfold.errors import UnsupportedModelError


@torch.no_grad()
def test_sinks_matter_here_and_are_kept():
    source = opened("gpt_oss")
    small = rankfold.compress(
        source, method=MoDeGPT(modules={"qk": 0.25, "vo": 0.25}, rank_multiple=2), calibration=tokens()
    ).model
    for block, dense in zip(small.model.layers, source.model.model.layers, strict=True):
        assert torch.equal(block.self_attn.sinks, dense.self_attn.sinks)
    before = small(some_ids()).logits
    small.model.layers[0].self_attn.sinks += 1.0
    assert not torch.allclose(small(some_ids()).logits, before, rtol=1e-2)


@torch.no_grad()
def test_what_is_left_of_an_attention_is_the_mean_of_what_it_sent_and_not_of_its_values():
    source, method = (
        opened("gpt_oss"),
        Rankfold(attention_aware=False, residual_correction=False, allow_module_removal=True),
    )
    view = source.block(0)
    stage = method.stages(view, {"qk": 0, "vo": 0})[0]
    result = decompose(
        stage, view, measure(view, start(source, tokens().ids, autocast=None), stage.statistics, step=False)
    )
    seen, o = [], source.model.model.layers[0].self_attn.o_proj
    hook = o.register_forward_hook(lambda _, __, output: seen.append(output.flatten(0, 1)))
    source.model(tokens().ids, use_cache=False)
    hook.remove()
    torch.testing.assert_close(result.state["self_attn.o_proj.bias"], torch.cat(seen).mean(0), rtol=1e-4, atol=1e-5)


def test_a_bias_that_a_sink_takes_some_of_cannot_move_into_another():
    method = LatentLLM(sparsity=0.1, attention_aware=True, joint="vo")
    with pytest.raises(
        UnsupportedModelError, match=r"attention_aware=true: its values have a bias, and its sinks take.*$"
    ):
        rankfold.compress(opened("gpt_oss"), method=method, calibration=tokens())
