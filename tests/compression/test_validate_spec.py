"""Specs read off blocks: against those that were written by hand, and on models that no spec is right for."""

import dataclasses
import itertools
from collections import OrderedDict

import pytest
import torch
import transformers as t
from huggingface_hub import constants
from torch import nn
from transformers.models.granite_swa.configuration_granite_swa import GraniteSWAConfig

import rankfold
from families import GQA, IDS, KINDS, SHAPE, cached_numbers, some_ids, tiny_model, tokens
from rankfold._utils.evaluating import cache_for, states_of_tokens
from rankfold.architectures import (
    Architecture,
    AttentionSpec,
    ByConfig,
    ExpertsSpec,
    MLPSpec,
    known_architectures,
    registry,
)
from rankfold.architectures.derive import derive
from rankfold.cli.models import code
from rankfold.compression import validate_spec as module
from rankfold.compression.validate_spec import validate_spec, validated
from rankfold.errors import UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes
from rankfold.exports.kept import stock_parameters

KNOWN = {a.model_type: a for a in known_architectures()}
# Their blocks are none that a spec can be read off: norms stand in the stream, BLOOM and Falcon add inside layers.
UNREADABLE = {"opt-post-norm", "bloom", "falcon-mqa", "falcon-gqa", "falcon-gqa-one-norm"}
STAYS_DENSE = {"falcon-sequential"}  # it repeats keys and values
# Of what a spec says, what does not show in numbers: names of rates and of a field, and norms that this model lacks.
FREE = {"dropout", "output_dropout", "qk_norm", "norm_offset", "width", "longrope"}


def forget(monkeypatch, model) -> None:
    """As if rankfold had no spec for it."""
    monkeypatch.delitem(registry._BY_TYPE, model.config.get_text_config().model_type)


def compared(spec, config, free=frozenset()) -> dict:
    found = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in free}
    return {name: value.of(config) if isinstance(value, ByConfig) else value for name, value in found.items()}


@pytest.mark.parametrize("family", sorted(set(KINDS) - UNREADABLE - STAYS_DENSE))
def test_the_spec_read_off_a_model_is_the_one_written_by_hand(family, monkeypatch):
    model = tiny_model(family)
    config = model.config.get_text_config()
    known = registry.architecture_of(model)
    forget(monkeypatch, model)
    source = rankfold.open_model(model, device="cpu")
    assert source.architecture.derived
    found = validate_spec(source)
    assert max(found.logits, found.attention, found.units or 0.0) < 1e-5
    outer = {"derived", "attention", "unless", "mlp", "norms", "norms_after", "experts", "needs_start"}
    assert compared(found.spec, config, outer) == compared(known, config, outer)
    if known.mlp is not None and known.experts is None:
        assert found.spec.mlp == dataclasses.replace(known.mlp, activation=None)
    else:
        assert found.spec.mlp is None
    assert_same_experts(found.spec.experts, known.experts)
    free = FREE | ({"kv_heads", "position"} if family.startswith("falcon") else set())  # ALiBi goes by the mask
    assert compared(found.spec.attention, config, free) == compared(known.attention, config, free)
    assert eval(code(found.spec)) == dataclasses.replace(found.spec, derived=False)  # what is printed can be pasted


def assert_same_experts(found, known) -> None:
    """But for what blocks do not show: fields of the config for widths, and the function between two layers."""
    assert (found is None) == (known is None)
    if known is not None:
        width = known.width if found.shared is None else None
        assert dataclasses.replace(found, shared=None) == dataclasses.replace(known, shared=None, width=width)
        assert (found.shared is None) == (known.shared is None)
        if known.shared is not None:
            assert found.shared == dataclasses.replace(known.shared, width=None, activation=None)


@pytest.mark.parametrize("family", sorted(UNREADABLE))
def test_a_block_that_is_read_wrongly_is_refused_with_the_reason(family, monkeypatch):
    model = tiny_model(family)
    forget(monkeypatch, model)
    with pytest.raises(
        UnsupportedModelError, match=r"has no spec, and the one read off its blocks does not hold: .*; see"
    ):
        validated(rankfold.open_model(model, device="cpu"))


AMONG_SIX = {"num_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAST_IS_FULL = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
LAST_IS_FULL["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]


def unknown(name: str) -> nn.Module:
    configs = {
        "ministral": lambda: t.MinistralConfig(**GQA, head_dim=8, sliding_window=8),
        "biogpt": lambda: t.BioGptConfig(**SHAPE, **IDS),
        "jais2": lambda: t.Jais2Config(**GQA, head_dim=8),
        "persimmon": lambda: t.PersimmonConfig(**SHAPE),
        "granite_swa": lambda: GraniteSWAConfig(**GQA, sliding_window=8, **IDS),  # with attention sinks
        # Experts: in all blocks; after a dense one, with a shared one; that and a gate in attention.
        "mellum": lambda: t.MellumConfig(**GQA, **IDS, **AMONG_SIX, head_dim=8),
        "hy_v3": lambda: t.HYV3Config(**GQA, **IDS, **AMONG_SIX, head_dim=8, first_k_dense_replace=1),
        "aria_text": lambda: t.AriaTextConfig(**GQA, **IDS, moe_num_experts=6, moe_topk=2, moe_num_shared_experts=1),
        "afmoe": lambda: t.AfmoeConfig(**GQA, **IDS, **AMONG_SIX, head_dim=8, num_dense_layers=1, sliding_window=8),
        "olmo_hybrid": lambda: t.OlmoHybridConfig(
            **{**SHAPE, **IDS, "num_key_value_heads": 4, "num_hidden_layers": 4},
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        ),
        # Latents in place of keys and values; others as wide as the values.
        "minicpm3": lambda: t.MiniCPM3Config(
            **{**SHAPE, **IDS, "num_key_value_heads": 4, "head_dim": 4},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8},
        ),
        # What a block sends goes with what its indexer has chosen.
        "glm_moe_dsa": lambda: t.GlmMoeDsaConfig(
            **{**SHAPE, **IDS, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 6},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8},
            **{"index_topk": 8, "index_head_dim": 8, "index_n_heads": 4, "first_k_dense_replace": 1},
        ),
        "dbrx": lambda: t.DbrxConfig(  # experts in one matrix, which keeps those of all below each other
            **{"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": 96},
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e3},
            ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
        ),
        # Recurrent blocks have the path of attention, which makes its angles itself, out of what it is given by place.
        "recurrent_gemma": lambda: t.RecurrentGemmaConfig(
            **(GQA | IDS), lru_width=32, attention_window_size=40, block_types=["recurrent", "attention"]
        ),
        # Wide layers without values of their own; layers that read keys and values of those before.
        "gemma4_unified_text": lambda: t.Gemma4UnifiedTextConfig(
            **GQA, **IDS, **LAST_IS_FULL, attention_k_eq_v=True, num_global_key_value_heads=1
        ),
        "gemma4_unified_text-shared": lambda: t.Gemma4UnifiedTextConfig(
            **(GQA | {"num_hidden_layers": 4}),
            **(IDS | LAST_IS_FULL | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
            num_kv_shared_layers=2,
        ),
        "mimo_v2_flash": lambda: t.MiMoV2FlashConfig(
            **{**GQA, **AMONG_SIX}, head_dim=8, v_head_dim=4, n_routed_experts=6
        ),
    }
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(configs[name]())
    for parameter in model.parameters():
        if parameter.dim() >= 2 or parameter.shape == (4,):
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


DENSE_PARTS = ["ministral", "biogpt", "jais2", "persimmon", "granite_swa", "recurrent_gemma"]
OTHER_PARTS = ["mellum", "hy_v3", "aria_text", "afmoe"]
ATTENTION_STAYS = ["olmo_hybrid", "minicpm3", "glm_moe_dsa", "mimo_v2_flash"]
ATTENTION_STAYS += ["gemma4_unified_text", "gemma4_unified_text-shared"]


@pytest.mark.parametrize(
    "name, method",
    [
        *itertools.product([*DENSE_PARTS, *OTHER_PARTS, *ATTENTION_STAYS], ["rankfold", "latentllm"]),
        *((name, "reap") for name in OTHER_PARTS),
    ],
)
def test_a_family_that_nobody_wrote_down_is_compressed_and_loads_again(name, method, tmp_path):
    model = unknown(name)
    assert model.config.model_type not in KNOWN
    model.save_pretrained(tmp_path / "dense")
    source = rankfold.open_model(tmp_path / "dense", device="cpu", dtype="float32")
    assert source.architecture.derived
    folder = rankfold.compress(
        source,
        method=rankfold.make_method(
            method,
            sparsity=0.1 if name in ATTENTION_STAYS else 0.2,
            **({} if method == "reap" else {"rank_multiple": 2}),
        ),
        calibration=tokens(),
        output=tmp_path / "small",
    ).output
    small, ids = rankfold.load(folder, device="cpu"), some_ids()
    with torch.no_grad():
        dense, less = model(ids).logits, small(ids).logits
        again = t.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)(ids).logits
    assert torch.equal(less, again) and stock_parameters(folder) is None
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    assert 0 < (less - dense).norm() < dense.norm()


def test_attention_of_which_later_blocks_have_more_stays_dense():
    """As MiniMax M3, whose first blocks lack the indexer of the others; of the few tokens of a proof it chooses all."""
    model = unknown("ministral")
    model.model.layers[2].self_attn.indexer = nn.Linear(32, 8)
    assert derive(model).attention.unsupported_reason == "its attention has indexer too"


@torch.no_grad()
def test_queries_that_grow_with_their_position_do_so_after_what_a_proof_runs(tmp_path):
    """As of Ministral 3, beyond the text that it was trained on first."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 1.0}
    config = t.Ministral3Config(
        **GQA, **IDS, head_dim=8, rope_parameters=rope | {"original_max_position_embeddings": 32}
    )
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.3)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.view(2, 8, -1)[:, 4:] = 0  # what is taken here is no loss
    small = rankfold.compress(
        model, 0.02, method="modegpt", modules=("vo",), rank_multiple=2, calibration=tokens(), output=tmp_path / "small"
    ).model
    assert type(small.model.layers[0].self_attn).__name__ == "CompressedAttention"
    ids = some_ids(length=120)
    torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)
    cache = t.DynamicCache(config=model.config)
    steps = [small(part, use_cache=True, **cache_for(small, cache)).logits for part in ids.split([100, 19, 1], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=1e-4, atol=1e-3)


def test_no_stock_model_of_such_a_family_is_narrower(tmp_path):
    """What its config can say is not known, and no weights tell how a class stores what they are padded to."""
    unknown("mellum").save_pretrained(tmp_path / "dense")
    common = {"calibration": tokens(), "sparsity": 0.1, "rank_multiple": 2}
    with pytest.raises(
        UnsupportedModelError, match=r"'mellum' is not one of the families .*take target='transformers'"
    ):
        rankfold.compress(tmp_path / "dense", target="stock", allocation="uniform", **common)
    rankfold.compress(tmp_path / "dense", output=tmp_path / "small", **common)
    for form in ("stock", "gguf", "deci"):
        with pytest.raises(UnsupportedModelError, match="mellum"):
            rankfold.export(tmp_path / "small", tmp_path / form, format=form)
        assert not (tmp_path / form).exists()


def test_a_proof_is_kept_for_models_on_the_disk(tmp_path, monkeypatch):
    """It is taken again for the same weights alone, and only where it is whole."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    unknown("persimmon").save_pretrained(tmp_path / "dense")
    proofs = []

    def counting(source):
        proofs.append(validate_spec(source))
        return proofs[-1]

    monkeypatch.setattr(module, "validate_spec", counting)

    def spec_of(model):
        return validated(rankfold.open_model(model, device="cpu")).architecture

    first = spec_of(tmp_path / "dense")
    assert first == spec_of(tmp_path / "dense") == dataclasses.replace(proofs[0].spec, derived=False)
    assert len(proofs) == 1
    (file,) = (tmp_path / "cache" / "rankfold" / "specs").iterdir()
    file.write_text("{}", encoding="utf-8")
    assert spec_of(tmp_path / "dense") == first and len(proofs) == 2
    for _ in range(2):
        assert spec_of(unknown("persimmon")) == first
    assert len(proofs) == 4
    other = unknown("persimmon")
    other.lm_head.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    assert spec_of(tmp_path / "other") == first and len(proofs) == 5
    monkeypatch.setattr(constants, "HF_HOME", "/dev/null")
    assert spec_of(tmp_path / "other") == first and len(proofs) == 6


def attention_that_gates(self, hidden_states, *args, **kwargs):
    output, weights = self.plain_forward(hidden_states, *args, **kwargs)
    return output * torch.sigmoid(hidden_states), weights


def norm_over_units(self, x):
    hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(hidden / hidden.norm(dim=-1, keepdim=True))


def test_units_that_depend_on_each_other_are_found(monkeypatch):
    monkeypatch.setattr(t.models.llama.modeling_llama.LlamaMLP, "forward", norm_over_units)
    model = tiny_model("llama")
    forget(monkeypatch, model)
    with pytest.raises(UnsupportedModelError, match=r"hidden units of block 0 depend on each other, by \d"):
        validated(rankfold.open_model(model, device="cpu"))


def test_attention_that_does_more_than_its_names_say_stays_dense(monkeypatch, caplog):
    attention = t.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "plain_forward", attention.forward, raising=False)
    monkeypatch.setattr(attention, "forward", attention_that_gates)
    model = tiny_model("llama")
    forget(monkeypatch, model)
    small = rankfold.compress(model, sparsity=0.2, calibration=tokens(), rank_multiple=2).model
    assert "stays dense: block 0 computes something else with its attention replaced, by" in caplog.text
    for dense, block in zip(model.model.layers, small.model.layers, strict=True):
        assert block.mlp.down_proj.weight.shape[1] < dense.mlp.down_proj.weight.shape[1]
        for name, weight in dense.self_attn.named_parameters():
            assert torch.equal(block.self_attn.get_parameter(name), weight), name


@pytest.mark.parametrize("name", ATTENTION_STAYS)
def test_what_attention_that_stays_dense_caches_is_measured(name, tmp_path):
    model = unknown(name)
    plan = rankfold.plan(model, 0.1, method="modegpt", calibration=tokens(), rank_multiple=2)
    assert plan.kv_bytes_per_token == plan.kv_bytes_per_token_after == 4 * cached_numbers(model) == cache_bytes(model)
    assert not {module.module for module in plan.modules} - {"mlp", "experts"}


def test_attention_that_makes_its_angles_itself_is_compressed():
    """As of RecurrentGemma, in one block of three here."""
    plan = rankfold.plan(unknown("recurrent_gemma"), 0.05, method="modegpt", calibration=tokens(), rank_multiple=2)
    assert {module.block for module in plan.modules if module.module in ("qk", "vo")} == {1}


def test_what_an_indexer_caches_is_counted():
    """It is of DeepSeek Sparse Attention, and has one head."""
    layer = t.cache_utils.DynamicIndexedLayer()
    layer.update(torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 6, 3))
    layer.update_indexer(torch.zeros(2, 6, 5))
    assert sum(x[0].numel() // x.shape[-2] for x in states_of_tokens(layer)) == 4 * 8 + 4 * 3 + 5


def test_experts_that_cannot_be_read_are_named(caplog):
    plan = rankfold.plan(unknown("dbrx"), 0.02, method="modegpt", calibration=tokens(), rank_multiple=2)
    assert {module.module for module in plan.modules} == {"qk", "vo"}
    assert "% of the weights of its blocks stay dense, as they are in no attention, MLP or experts" in caplog.text
    assert "can be read: ffn.experts.mlp and " in caplog.text


def test_nothing_is_said_of_norms_and_routers(caplog):
    for name in DENSE_PARTS + ["hy_v3"]:
        validated(rankfold.open_model(unknown(name), device="cpu"))
    assert "weights of its blocks stay dense" not in caplog.text


def test_a_norm_over_hidden_units_is_the_reason():
    model = t.AutoModelForCausalLM.from_config(t.BitNetConfig(**GQA, **IDS))
    with pytest.raises(
        UnsupportedModelError, match=r"block 0 does not run with half of its hidden units \(The size of"
    ):
        validated(rankfold.open_model(model, device="cpu"))


def test_a_stream_of_another_shape_is_the_reason(monkeypatch):
    """As of DeepSeek V4 or HY V4, whose blocks mix several streams."""
    monkeypatch.setattr(
        t.models.llama.modeling_llama.LlamaAttention,
        "forward",
        lambda self, hidden_states, **_: (hidden_states[:, :1], None),
    )
    model = tiny_model("llama")
    forget(monkeypatch, model)
    message = r"self_attn of a block sends \(2, 1, 32\), and what blocks hand on is \(2, 24, 32\)"
    with pytest.raises(UnsupportedModelError, match=message):
        validated(rankfold.open_model(model, device="cpu"))


class Alone(nn.Sequential):
    """One layer in place of three."""

    def __init__(self):
        super().__init__(OrderedDict(down_proj=nn.Linear(32, 32)))


@pytest.mark.parametrize(
    "mlp, message",
    [(nn.Identity, "block 2 has no mlp.down_proj, as others have"), (Alone, "running its blocks ends in Attribute")],
)
def test_blocks_that_differ_in_kind_are_refused(monkeypatch, mlp, message):
    model = tiny_model("llama")
    forget(monkeypatch, model)
    source = rankfold.open_model(model, device="cpu")
    source.blocks[2].mlp = mlp()
    with pytest.raises(UnsupportedModelError, match=message):
        validated(source)


def test_a_model_without_such_parts_says_which():
    model = t.AutoModelForCausalLM.from_config(
        t.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)
    )
    with pytest.raises(
        UnsupportedModelError, match="'mamba' has no spec, and none can be read off its blocks: its attention"
    ):
        derive(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = t.AutoModelForCausalLM.from_config(t.JetMoeConfig(**sizes, kv_channels=8, num_local_experts=2))
    with pytest.raises(UnsupportedModelError, match="attention has experts.router.layer, kv_proj, not one output"):
        derive(model)
    assert Architecture and AttentionSpec and ExpertsSpec and MLPSpec  # names that printed specs use
