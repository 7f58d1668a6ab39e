"""Checkpoints whose experts lie one by one, as on the hub: read block by block all the same."""

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import rankfold
from families import GQA, IDS, SHAPE, some_ids, tokens
from rankfold import MoDeGPT
from rankfold.errors import CheckpointError

E = 12  # more than ten: 10 comes after 9
SIZES = {**GQA, "intermediate_size": 16}
CONFIGS = {
    "mixtral": lambda: t.MixtralConfig(**SIZES, num_local_experts=E),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **SIZES, num_experts=E, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**SIZES, num_experts=E, moe_intermediate_size=16, head_dim=8),
    "olmoe": lambda: t.OlmoeConfig(**{**SIZES, **IDS}, num_experts=E),
    "granitemoe": lambda: t.GraniteMoeConfig(**SIZES, num_local_experts=E),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **{"n_routed_experts": E, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 16},
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "nemotron_h": lambda: t.NemotronHConfig(
        **{key: value for key, value in GQA.items() if key != "num_hidden_layers"},
        **{"n_routed_experts": E, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "head_dim": 8},
        layers_block_type=["linear_attention", "moe", "full_attention"],
    ),
}


def saved(folder, family: str, **options):
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    model.save_pretrained(folder, **options)
    return model


def opened(what):
    source = rankfold.open_model(what, device="cpu")
    source.autocast = None
    return source


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_blocks_are_read_one_by_one_and_are_those_of_the_model(family, tmp_path):
    model = saved(tmp_path / "dense", family, max_shard_size="40KB")
    source = opened(tmp_path / "dense")
    stored = load_file(next((tmp_path / "dense").glob("*.safetensors")))
    assert not any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in stored)
    assert source.streamed and len(list((tmp_path / "dense").glob("*.safetensors"))) > 1
    for index in range(3):
        theirs, ours = model.model.layers[index].state_dict(), source.block(index).module.state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert source.fingerprint == opened(model).fingerprint


def test_blocks_are_read_by_the_names_of_the_hub(tmp_path):
    """Transformers saves its own names of Nemotron-H, which read as well."""
    model = saved(tmp_path / "dense", "nemotron_h")
    (file,) = (tmp_path / "dense").glob("*.safetensors")
    stored = {name.replace("model.", "backbone.", 1): tensor for name, tensor in load_file(file).items()}
    assert sum(name.startswith("backbone.layers.") for name in stored) > 30
    save_file(stored, file, metadata={"format": "pt"})
    source = opened(tmp_path / "dense")
    for index in range(3):
        theirs, ours = model.model.layers[index].state_dict(), source.block(index).module.state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    small = rankfold.compress(
        source, method=MoDeGPT(modules={"experts": 0.5}), calibration=tokens(8), output=tmp_path / "a"
    )
    with torch.no_grad():
        assert torch.isfinite(rankfold.load(small.output, device="cpu")(some_ids()).logits).all()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_streamed_gives_what_is_given_in_memory(family, tmp_path):
    model = saved(tmp_path / "dense", family)
    method = MoDeGPT(modules={"experts": 0.5})
    folders = [
        rankfold.compress(opened(what), method=method, calibration=tokens(8), output=tmp_path / name).output
        for what, name in ((tmp_path / "dense", "streamed"), (model, "resident"))
    ]
    states = [rankfold.load(folder, device="cpu").state_dict() for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    again = rankfold.load(folders[0], device="cpu")
    with torch.no_grad():
        assert torch.isfinite(again(some_ids()).logits).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s, name: s.pop(name), "gate_up_proj do not go together|has shape"),
        (lambda s, name: s.update({name: s[name].bfloat16()}), "hold BF16 and F32; save the checkpoint in one dtype"),
        (lambda s, name: s.update({name: s[name][:4].clone()}), "parts of .*gate_up_proj do not go together"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_in_one_line(change, message, tmp_path):
    saved(tmp_path / "dense", "mixtral")
    path = tmp_path / "dense" / "model.safetensors"
    state = load_file(path)
    change(state, "model.layers.1.block_sparse_moe.experts.7.w1.weight")
    save_file(state, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as error:
        rankfold.open_model(tmp_path / "dense", device="cpu")
    assert "\n" not in str(error.value)
