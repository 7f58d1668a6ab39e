"""Traits that only some blocks or some checkpoints of a family have."""

import pytest
import torch
import transformers as t
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

import rankfold
from families import GQA, opened
from rankfold.architectures import part_of
from rankfold.compression.importance import statistics_of
from rankfold.compression.latency import likeness
from rankfold.errors import UnsupportedModelError

UNTOLD = {
    "use_qk_norm": (t.CohereConfig, {"use_qk_norm": True}),
    "qk_layernorm": (t.StableLmConfig, {"qk_layernorm": True}),
    "clip_qkv": (t.OlmoConfig, {"clip_qkv": 1.0}),
    "attn_config.clip_qkv": (t.MptConfig, {"attn_config": {"clip_qkv": 1.0}}),
}


@pytest.mark.parametrize("field", UNTOLD)
def test_what_no_spec_can_say_is_refused_in_one_line(field):
    config, options = UNTOLD[field]
    model = t.AutoModelForCausalLM.from_config(config(**GQA, **options))
    with pytest.raises(UnsupportedModelError, match=rf"^this \w+ has {field}=.*: .*; models of this family without it"):
        rankfold.open_model(model, device="cpu")


def test_experts_of_a_token_must_be_a_number(tmp_path):
    """transformers' own default is none; such a config can be planned with, but not run."""
    t.DeepseekV2Config(**GQA, n_routed_experts=4, num_experts_per_tok=None).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok=None.*; correct config.json"):
        rankfold.plan(tmp_path, sparsity=0.2, gpu="80GB")


@pytest.mark.parametrize("family, still", [("smollm3", 1), ("cohere2", 2), ("exaone4", 2), ("llama", None)])
def test_blocks_may_differ_in_whether_they_rotate(family, still):
    source = opened(family)
    turning = [source.meta_block(i).attention.rotary_dim for i in range(3)]
    assert turning == [0 if i == still else 8 for i in range(3)]
    alike = {likeness(source.meta_block(i)) for i in range(3)}
    assert len(alike) == (1 if still is None else 2)  # their times are measured apart


def test_what_is_measured_is_what_any_block_needs():
    method = rankfold.make_method("modegpt")
    assert {"query_key", "key_spread"} <= statistics_of(opened("smollm3"), method)
    assert "key_spread" not in statistics_of(opened("llama"), method)


def test_a_tower_answers_to_the_usual_names_with_older_transformers_too(monkeypatch):
    with torch.device("meta"):
        model = t.AutoModelForImageTextToText.from_config(t.Qwen2VLConfig(vision_config={"depth": 3, "num_heads": 4}))
    monkeypatch.setattr(Qwen2VLVisionConfig, "attribute_map", {})
    config = part_of(model, "vision").config
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 4)
    assert "num_hidden_layers" not in config.to_dict()


def test_tables_of_three_positions_a_token_are_refused_in_one_line():
    """As the attention of Qwen2-VL gets them from transformers before 5.20."""
    attention, tables = opened("llama").block(0).attention, (torch.ones(3, 1, 4, 8), torch.ones(3, 1, 4, 8))
    with pytest.raises(UnsupportedModelError, match="^this model .* three positions a token.*install transformers>=5"):
        attention.angles({"position_embeddings": tables})
