"""Gemma 4 with experts: these work beside the MLP, both after and before norms of their own.

References are what transformers' own modules receive and send.

Shape legend: n tokens, E experts, D model width.
"""

import math

import pytest
import torch
import transformers as t
from test_experts import E, logits, opened
from torch import Tensor, nn

import rankfold
from families import GQA, IDS, tokens
from rankfold import Rankfold
from rankfold.architectures import architecture_of
from rankfold.calibration.runner import advance, measure, start
from rankfold.errors import UnsupportedModelError

KINDS = {
    "plain": {},
    "handed on": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
}
METHODS = ["rankfold", "modegpt", "latentllm", "reap", "svd-llm", "flap", "obd"]


def config_of(**fields) -> t.Gemma4TextConfig:
    given = GQA | IDS | {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0} | fields
    return t.Gemma4TextConfig(
        **given,
        **{"enable_moe_block": True, "num_experts": E, "top_k_experts": 2, "moe_intermediate_size": 24},
        **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "vocab_size_per_layer_input": 96},
        layer_types=["sliding_attention", "full_attention"] * (given["num_hidden_layers"] // 2),
    )


def filled(model: nn.Module) -> nn.Module:
    """Weights, norms and scales large enough that every path matters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.15)
        elif "norm" in name or "scale" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def made(**fields) -> nn.Module:
    torch.manual_seed(0)
    return filled(t.AutoModelForCausalLM.from_config(config_of(**fields)))


def with_images() -> nn.Module:
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = t.Gemma4Config(
        text_config=config_of().to_dict(),
        vision_config=tower | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
        audio_config=None,
        **{f"{name}_token_id": 96 + i for i, name in enumerate(("image", "boi", "eoi", "audio", "video"))},
    )
    return filled(t.Gemma4ForConditionalGeneration(config))


MODELS = {kind: lambda kind=kind: made(**KINDS[kind]) for kind in KINDS} | {"with images": with_images}


def options_of(method: str) -> dict:
    return {} if method == "reap" else {"rank_multiple": 2}


@torch.no_grad()
def loss(model: nn.Module) -> float:
    return model(tokens().held_out, labels=tokens().held_out).loss.item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_planned_is_what_comes_out(kind, method, tmp_path):
    dense = MODELS[kind]()
    how = {"method": method, "calibration": tokens(), "output": tmp_path / "small", **options_of(method)}
    if kind == "handed on" and method == "obd":
        with pytest.raises(UnsupportedModelError, match="hand keys and values on to later ones"):
            rankfold.compress(dense, 0.15, **how)
        return
    found = rankfold.compress(opened(dense), 0.15, **how)
    small, said = rankfold.load(found.output), found.record["held_out"]
    assert sum(p.numel() for p in small.parameters()) == found.plan.parameters_after < found.plan.parameters
    assert math.log(said["perplexity_dense"]) == pytest.approx(loss(dense), abs=1e-3)
    assert math.log(said["perplexity"]) == pytest.approx(loss(small), abs=1e-3)
    if method in ("rankfold", "modegpt"):
        assert {module.module for module in found.plan.modules} == {"mlp", "experts"}


@pytest.mark.parametrize("method", ["rankfold", "modegpt", "latentllm"])
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_removed_leaves_the_logits(kind, method):
    dense = MODELS[kind]()
    small = rankfold.compress(dense, 0.0, method=method, calibration=tokens()).model
    torch.testing.assert_close(logits(small), logits(dense))


def test_errors_count_relative_to_the_norms_behind():
    """Hidden units of the MLP over the RMS of what it sends, and routing weights over that of what all experts send."""
    dense, seen = made(), {}

    def note(name: str):
        return lambda _, args, sent: seen.__setitem__(name, (*args, sent))

    source, data = opened(dense), tokens(4)
    view, block = source.block(1), dense.model.layers[1]
    watched = {"mlp": block.mlp.down_proj, "experts": block.experts}
    watched |= {name: getattr(block, f"post_feedforward_layernorm_{name}") for name in "12"}
    for name, module in watched.items():
        module.register_forward_hook(note(name))
    logits_of(dense, data.ids)
    method = Rankfold(sparsity=0.2)
    moments = measured(source, data, method.statistics(view), index=1)
    h, (x, chosen, weights, _) = seen["mlp"][0].flatten(0, 1).double(), seen["experts"]
    rows = h / over(seen["1"][0].flatten(0, 1))
    torch.testing.assert_close(moments["mlp_hidden"].second_moment(), rows.T @ rows / len(rows), rtol=1e-4, atol=1e-7)
    spread = torch.zeros(len(x), E).double().scatter_(1, chosen, weights.double() / over(seen["2"][0].flatten(0, 1)))
    torch.testing.assert_close(moments["experts_routing"].rows.double(), spread, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moments["experts_input"].rows, x, rtol=1e-4, atol=1e-5)


def over(x: Tensor) -> Tensor:
    """``(n, 1)`` what a norm divides the rows of ``(n, D)`` by."""
    return (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def measured(source, data, statistics: set[str], index: int):
    """What is measured in a block as the model is compressed: the statistics of one step."""
    stream = start(source, data.ids, autocast=None)
    for before in range(index):
        advance(source.block(before), stream)
    return measure(source.block(index), stream, statistics, step=False)


def test_a_dense_model_of_the_family_has_no_experts():
    """So it is refused, counted and shared out as others without are."""
    config = config_of()
    config.enable_moe_block, config.num_experts, config.top_k_experts = False, None, None
    dense = t.AutoModelForCausalLM.from_config(config)
    assert architecture_of(dense).experts is None
    with pytest.raises(UnsupportedModelError, match="has none that rankfold can remove"):
        rankfold.plan(dense, 0.2, method="reap")
    assert rankfold.plan(dense, 0.1, method="modegpt", budget="flops", rank_multiple=2).modules
