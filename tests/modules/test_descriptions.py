"""Descriptions out of a stranger's checkpoint: what could be built and not run is refused where it is read."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from rankfold.modules import build
from rankfold.modules.descriptions import check_attention

CONFIG = LlamaConfig(hidden_size=32, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)


def linear(n_in: int, n_out: int) -> dict:
    return {"kind": "linear", "in": n_in, "out": n_out, "bias": False}


def attention(**changes) -> dict:
    widths = {"q": linear(32, 16), "k": linear(32, 8), "v": linear(32, 12), "o": linear(24, 32)}
    sizes = {"kind": "attention", "heads": 8, "kv_heads": 4, "qk_dim": 2, "vo_dim": 3, "scaling": 0.5, "rotary_dim": 4}
    return sizes | widths | changes


def latent(n_in: int, n_out: int) -> dict:
    return {"kind": "latent", "in": n_in, "out": n_out, "rank": 2, "form": "plain", "bias": False}


def test_a_sound_one_is_built():
    for spec in (
        attention(),
        attention(softcap=30.0, window=4, sliding_window=0, dropout=0, output_dropout=1.0, rotary_base=1e4),
        attention(k=latent(32, 8), latent_cache="k"),
    ):
        build(spec, LlamaAttention(CONFIG, 0), CONFIG)


def one_latent(**changes) -> dict:
    spec = {key: value for key, value in attention().items() if key not in "qkv"}
    return spec | {"qkv": latent(32, 16 + 8 + 12), "latent_cache": "kv"} | changes


def test_one_latent_for_all_three_is_checked_as_a_whole():
    build(one_latent(), LlamaAttention(CONFIG, 0), CONFIG)
    for qkv, message in ((latent(32, 35), "'qkv' of this attention must have out 36"), (linear(32, 36), "no latent")):
        with pytest.raises(ValueError, match=message):
            check_attention(one_latent(qkv=qkv))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "kv_heads of an attention must divide its 8 heads, got 3"),
        ({"scaling": "x"}, "'scaling' of an attention must be a number, got 'x'"),
        ({"scaling": math.nan}, "'scaling' of an attention must be a number, got nan"),
        ({"scaling": True}, "'scaling' of an attention must be a number, got True"),
        ({"softcap": 0}, "'softcap' of an attention must be a positive number, got 0"),
        ({"softcap": math.inf}, "'softcap' of an attention must be a positive number, got inf"),
        ({"rotary_base": -1e4}, "'rotary_base' of an attention must be a positive number"),
        ({"rotary_dim": 3}, "'rotary_dim' of an attention must be an even number, got 3"),
        ({"rotary_dim": -2}, "'rotary_dim' of an attention must be an even number, got -2"),
        ({"growth": math.inf, "growth_step": 8}, "'growth' of an attention must be a number, got inf"),
        ({"growth": 0.1, "growth_step": 0}, "'growth_step' of an attention must be a positive number, got 0"),
        ({"growth": 0.1}, "'growth' of an attention needs a 'growth_step'"),
        ({"window": "x"}, "'window' of an attention must be an integer that is not negative, got 'x'"),
        ({"window": -1}, "'window' of an attention must be an integer that is not negative, got -1"),
        ({"sliding_window": 1.5}, "'sliding_window' of an attention must be an integer that is not negative, got 1.5"),
        ({"dropout": 1.1}, r"'dropout' of an attention must be in \[0, 1\], got 1.1"),
        ({"output_dropout": -0.1}, r"'output_dropout' of an attention must be in \[0, 1\], got -0.1"),
        ({"qk_dim": 0}, "both widths or none, got qk_dim 0 and vo_dim 3"),
        ({"qk_dim": 3, "selected_pairs": True}, "turns pairs must be even, got 3"),
        ({"q": linear(32, 15)}, "'q' of this attention must have out 16, got 15"),
        ({"k": linear(32, 16)}, "'k' of this attention must have out 8, got 16"),
        ({"v": linear(32, 13)}, "'v' of this attention must have out 12, got 13"),
        ({"o": linear(25, 32)}, "'o' of this attention must have in 24, got 25"),
        ({"latent_cache": "kv", "k": latent(32, 8)}, "'v' of this attention has no latent to cache"),
    ],
)
def test_what_could_not_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(attention(**changes), LlamaAttention(CONFIG, 0), CONFIG)


def test_only_a_norm_is_adopted():
    with pytest.raises(ValueError, match="cannot adopt 'layer_idx' as q_norm: it is int, not a norm"):
        build(attention(adopt={"q_norm": "layer_idx"}), LlamaAttention(CONFIG, 0), CONFIG)


def test_an_embedding_stays():
    with pytest.raises(ValueError, match="a linear module stands for no embedding"):
        build(linear(32, 32), nn.Embedding(4, 32))


@pytest.mark.parametrize("kind", ["experts", "latent_experts"])
def test_there_are_as_many_experts_as_before(kind):
    config = AutoConfig.for_model("mixtral", hidden_size=8, intermediate_size=8, num_local_experts=4)
    spec = {"kind": kind, "in": 8, "width": 4, "bias": False, "transposed": False}
    spec |= {"rising": linear(8, 8), "falling": linear(4, 8)}
    with torch.device("meta"):
        assert build(spec | {"experts": 4}, MixtralExperts(config)) is not None
        with pytest.raises(ValueError, match=f"'experts' of a {kind} module must be 4, got 100000"):
            build(spec | {"experts": 100_000}, MixtralExperts(config))
