"""GGUF files: read by transformers alone where it can, their numbers and settings, what their tokenizer says."""

import json
import shutil

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

import rankfold
import tiny_pairs
from families import opened, tokens
from rankfold.calibration.leaving import watched
from rankfold.calibration.observers import LayerInput
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.exports.gguf_blocks import packed
from rankfold.linalg.block_rounding import round_to_blocks, rounding_order
from saved import save_gguf, save_tiny, save_tokenizer_over_characters
from versions import needs

GROUP = 32  # of Q8_0
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def compressed(folder, method=None, **options):
    save_tiny(folder / "model", blocks=3, **options)
    source = rankfold.open_model(folder / "model", device="cpu")
    source.autocast = None
    method = method or rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    return rankfold.compress(
        source, method=method, calibration=tokens(), output=folder / "small", mode="one-pass"
    ).output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    compressed(folder)
    return folder


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def settings(file) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 2e-2), ("bfloat16", 1e-1), ("q8_0", 1e-1)])
def test_transformers_reads_it_and_computes_the_same(place, tmp_path, dtype, tolerance):
    result = rankfold.export(place / "small", tmp_path / "x.gguf", "gguf", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    expected = logits(rankfold.load(place / "small", device="cpu"))
    assert ((logits(model) - expected).norm() / expected.norm()).item() < tolerance
    assert sum(p.numel() for p in model.parameters()) == result.exported < result.dense


def test_a_dense_model_is_exported_from_a_folder_and_from_a_file_whose_numbers_are_rounded_once(tmp_path):
    save_tiny(tmp_path / "model", blocks=2)
    save_gguf(tmp_path / "model", tmp_path / "model.gguf")
    for name in ("model", "model.gguf"):
        result = rankfold.export(tmp_path / name, tmp_path / f"{name}-q8", "gguf", dtype="q8_0")
        assert result.dense == result.compressed == result.exported and result.kept == 1
    before, after = (gguf.GGUFReader(tmp_path / name) for name in ("model.gguf", "model.gguf-q8"))
    numbers = {tensor.name: tensor for tensor in after.tensors}
    of_blocks = [tensor for tensor in before.tensors if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0]
    assert len(of_blocks) > 10
    for tensor in of_blocks:  # they stay as they are
        assert (tensor.data == numbers[tensor.name].data).all(), tensor.name
    with pytest.raises(OptionError, match="model.gguf is a stock model already, nothing is to be exported"):
        rankfold.export(tmp_path / "model.gguf", tmp_path / "stock")


def test_matrices_are_in_the_dtype_and_vectors_in_fp32(place, tmp_path):
    kind = gguf.GGMLQuantizationType
    for dtype, wanted in (("float16", kind.F16), ("bfloat16", kind.BF16), ("q8_0", kind.Q8_0)):
        rankfold.export(place / "small", tmp_path / dtype, "gguf", dtype=dtype)
        for tensor in gguf.GGUFReader(tmp_path / dtype).tensors:
            vector = len(tensor.shape) == 1
            whole = wanted != kind.Q8_0 or tensor.shape[0] % GROUP == 0
            assert tensor.tensor_type == (kind.F32 if vector else wanted if whole else kind.F16), tensor.name


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A model whose middle block is dense."""
    folder = tmp_path_factory.mktemp("uneven")
    small = compressed(folder, rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2, exclude_blocks=(1,)))
    return small, rankfold.load(small, device="cpu")


def test_deci_has_every_mlp_in_its_own_width_and_its_very_numbers(uneven, tmp_path):
    small, model = uneven
    result = rankfold.export(small, tmp_path / "x.gguf", "gguf-deci")
    assert result.compressed < result.exported < result.dense and result.difference < 1e-5
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    for index, block in enumerate(model.model.layers):
        for name in ("gate", "up", "down"):
            weight = getattr(block.mlp, f"{name}_proj").weight.detach()
            assert torch.equal(torch.from_numpy(there[f"blk.{index}.ffn_{name}.weight"].data.copy()), weight)
    found = settings(tmp_path / "x.gguf")
    widths = [block.mlp.down_proj.in_features for block in model.model.layers]
    assert found["general.architecture"] == "deci" and found["deci.feed_forward_length"] == widths and widths[1] == 48
    assert len(set(widths)) > 1


def test_names_that_promise_another_format_and_files_that_transformers_does_not_read_are_said(uneven, tmp_path):
    small, _ = uneven
    with pytest.raises(
        rankfold.RankfoldError, match=r"x.gguf is the name of a GGUF file, and format stock is a folder"
    ):
        rankfold.export(small, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
    rankfold.export(small, tmp_path / "y.gguf", "gguf-deci")
    with pytest.raises(rankfold.RankfoldError, match="has architecture deci, which llama.cpp runs and transformers"):
        rankfold.load(tmp_path / "y.gguf")


def test_a_deci_folder_says_what_vllm_reads(uneven, tmp_path):
    small, model = uneven
    result = rankfold.export(small, tmp_path / "deci", "deci")
    for read in (rankfold.load, rankfold.open_model):
        with pytest.raises(
            UnsupportedModelError, match="code of its own, which is not run; .* an export for an engine"
        ):
            read(tmp_path / "deci")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "deci", trust_remote_code=True)
    widths = [block.mlp.down_proj.in_features for block in model.model.layers]
    assert config.architectures == ["DeciLMForCausalLM"] and config.model_type == "nemotron-nas"
    assert [block.ffn.intermediate_size for block in config.block_configs] == widths
    for block in config.block_configs:  # as vLLM's nemotron_nas.py asks
        assert not (block.attention.no_op or block.ffn.no_op or hasattr(block.ffn, "ffn_mult"))
        assert config.num_attention_heads // block.attention.n_heads_in_group == 2
    state = {}
    for file in sorted((tmp_path / "deci").glob("*.safetensors")):
        state |= load_file(file)
    for index, block in enumerate(model.model.layers):
        for name, tensor in block.mlp.state_dict().items():
            assert torch.equal(state[f"model.layers.{index}.mlp.{name}"], tensor)
    assert sum(tensor.numel() for tensor in state.values()) == result.exported
    again = type(config)(**{key: value for key, value in config.to_dict().items() if key != "model_type"})
    assert again.to_dict() == config.to_dict()


def test_settings_are_those_of_the_exported_model(place, tmp_path):
    rankfold.export(place / "small", tmp_path / "x.gguf", "gguf")
    found, config = settings(tmp_path / "x.gguf"), rankfold.load(place / "small", device="cpu").config
    assert found["llama.attention.key_length"] == found["llama.attention.value_length"] == 8
    assert found["llama.rope.dimension_count"] == 8 and found["llama.context_length"] == 128
    assert found["llama.rope.freq_base"] == config.rope_parameters["rope_theta"]
    assert found["general.name"] == "model, by rankfold"  # the dense model's name, whatever the folder's is
    assert found["general.file_type"] == gguf.LlamaFileType.ALL_F32


def test_a_model_in_memory_is_named_as_it_was_loaded(place, tmp_path):
    dense = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    for path, name in ((str(place / "model"), "model"), ("owner/small-llama", "small-llama"), ("", "LlamaForCausalLM")):
        dense.name_or_path = path
        rankfold.export(dense, tmp_path / f"{name}.gguf", "gguf", tokenizer=tokenizer)
        assert settings(tmp_path / f"{name}.gguf")["general.name"] == f"{name}, by rankfold"


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_heads_that_turn_by_the_same_pairs_are_narrow_and_their_frequencies_are_written(scaling, tmp_path):
    """llama.cpp turns pair i by theta^(-2 i / width) over the factor; the reference is the dense frequencies."""
    options = {} if scaling is None else {"rope_parameters": scaling}
    small = compressed(tmp_path, rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2, head_dim=6), **options)
    result = rankfold.export(small, tmp_path / "x.gguf", "gguf-deci")
    assert result.exported == result.compressed < result.dense and result.difference < 1e-5
    found = settings(tmp_path / "x.gguf")
    arch = found["general.architecture"]
    assert found[f"{arch}.attention.key_length"] == found[f"{arch}.attention.value_length"] == 6
    assert found[f"{arch}.rope.dimension_count"] == 6
    model = rankfold.load(small, device="cpu")
    pairs = {tuple(row) for block in model.model.layers for row in block.self_attn.rotary_pairs.tolist()}
    (pairs,) = pairs
    (factors,) = (t for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors if t.name == "rope_freqs.weight")
    turned = 10000.0 ** -(torch.arange(3) / 3) / torch.from_numpy(factors.data.copy())
    dense = rankfold.open_model(tmp_path / "model", device="cpu").inv_freq(0)
    torch.testing.assert_close(turned, dense[list(pairs)])


def test_the_tokenizer_gives_the_same_ids_and_says_what_it_adds(place, tmp_path):
    rankfold.export(place / "small", tmp_path / "x.gguf", "gguf")
    ours = transformers.AutoTokenizer.from_pretrained(place / "small")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    text = "class Integers: 12 + 345, and so on.\n\tIt's a test."
    assert again(text).input_ids == ours(text).input_ids
    found = settings(tmp_path / "x.gguf")
    assert found["tokenizer.ggml.pre"] == "gpt-2" and len(found["tokenizer.ggml.tokens"]) == 400
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert found["tokenizer.ggml.add_bos_token"] is False
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[0] == kinds[1] == gguf.TokenType.CONTROL and kinds[-1] == gguf.TokenType.UNUSED


def test_a_tokenizer_over_characters_merges_in_its_order(place, tmp_path):
    """llama.cpp merges the pair whose token has the best score; the reference is the order of the merges."""
    needs("transformers", "5.23", "tokenizers of .gguf files begin no text with their token for it")
    shutil.copytree(place / "small", tmp_path / "small")
    save_tokenizer_over_characters(tmp_path / "small")
    rankfold.export(tmp_path / "small", tmp_path / "x.gguf", "gguf")
    found = settings(tmp_path / "x.gguf")
    model = json.loads((tmp_path / "small" / "tokenizer.json").read_text())["model"]
    tokens_, scores, kinds = (found[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    by_score = sorted(range(len(tokens_)), key=lambda number: -scores[number])
    merged = ["".join(merge) for merge in model["merges"]]
    assert [tokens_[number] for number in by_score[: len(merged)]] == merged
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.bos_token_id"] == 1
    kind = gguf.TokenType
    assert kinds[:4] == [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, kind.BYTE] and kinds[300] == kind.NORMAL
    ours, again = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "small"),
        transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf"),
    )
    assert again("The class of integers").input_ids == ours("The class of integers").input_ids


def test_biases_and_stretched_frequencies_are_written(tmp_path):
    small = compressed(tmp_path, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
    result = rankfold.export(small, tmp_path / "x.gguf", "gguf", dtype="float32")
    assert result.difference < 1e-5
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert {"blk.0.attn_q.bias", "blk.2.attn_output.bias", "blk.1.ffn_down.bias"} <= there.keys()
    inv_freq = rankfold.load(small, device="cpu").model.rotary_emb.inv_freq
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / torch.from_numpy(there["rope_freqs.weight"].data.copy()), inv_freq)


def test_rows_are_turned_pair_by_pair(place, tmp_path):
    """llama.cpp rotates neighbours; the reference is a loop over heads."""
    rankfold.export(place / "small", tmp_path / "x.gguf", "gguf", dtype="float32")
    rankfold.export(place / "small", tmp_path / "stock")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    for name, heads in (("q", 4), ("k", 2)):
        weight = getattr(model.model.layers[1].self_attn, f"{name}_proj").weight.detach()
        rows = [weight[8 * h + p + 4 * half] for h in range(heads) for p in range(4) for half in range(2)]
        assert torch.equal(torch.from_numpy(there[f"blk.1.attn_{name}.weight"].data.copy()), torch.stack(rows))


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path):
    for number, (options, message) in enumerate(
        [
            ({"hidden_act": "gelu"}, "takes a activation out of silu, swish, got gelu"),
            (
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
                "rotary embedding out of",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        small = compressed(folder, **options)
        for kind in ("gguf", "gguf-deci"):
            with pytest.raises(UnsupportedModelError, match=message):
                rankfold.export(small, folder / "x.gguf", kind)
        assert sorted(path.name for path in folder.iterdir()) == ["model", "small"]


@pytest.mark.parametrize("dtype", ["float32", "q4_0"])
@pytest.mark.parametrize("family, options", [("qwen2", {}), ("qwen2", {"head_dim": 12}), ("qwen3", {"head_dim": 12})])
def test_a_qwen_is_written_as_its_own_architecture(family, options, dtype, tmp_path):
    """Rows of queries and keys stay in their order there, biases and norms come along."""
    save_tiny(tmp_path / "model", blocks=2, family=family, **options)
    text = {"calibration": tokens()} if dtype == "q4_0" else {}
    rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf", dtype=dtype, **text)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = rankfold.load(tmp_path / "x.gguf", dtype="float32", device="cpu")
    assert settings(tmp_path / "x.gguf")["general.architecture"] == family == again.config.model_type
    assert set(again.state_dict()) == set(dense.state_dict())
    for name, tensor in dense.state_dict().items():
        close = 0.2 if dtype == "q4_0" and tensor.dim() == 2 else 1e-6
        assert (again.state_dict()[name] - tensor).norm() <= close * tensor.norm(), name
    assert ((logits(again) - logits(dense)).norm() / logits(dense).norm()).item() < (0.7 if text else 1e-5)


def test_what_qwen_has_no_form_for_in_llama_cpp_is_refused(tmp_path):
    for number, (options, format, message) in enumerate(
        [
            (
                {"family": "qwen2", "rope_parameters": LLAMA3},
                "gguf",
                "llama.cpp's qwen2 has no rotary frequencies .*; use format='gguf-deci', or format='stock'",
            ),
            (
                {"family": "qwen3", "attention_bias": True},
                "gguf",
                "llama.cpp's qwen3 has no biases, which this model has; use format='stock'",
            ),
            ({"family": "qwen3"}, "gguf-deci", "takes a model type out of llama, mistral, qwen2, got qwen3"),
            ({"family": "qwen2"}, "deci", "takes a model type out of llama, mistral, got qwen2"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_tiny(folder / "model", blocks=2, **options)
        with pytest.raises(UnsupportedModelError, match=message):
            rankfold.export(folder / "model", folder / "x.gguf" if "gguf" in format else folder / "x", format)
        assert [path.name for path in folder.iterdir()] == ["model"]


GEMMA3 = {"family": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}


@pytest.mark.parametrize("dtype", ["float32", "q4_0"])
def test_a_gemma_is_written_with_its_norms_and_windows(dtype, tmp_path):
    """Scales of norms are whole ones in a file; windows, both bases and the scale of scores are read back."""
    theta = {"sliding_attention": 5000.0, "full_attention": 2e6}
    kinds = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}
    rope = {name: kind | {"rope_theta": theta[name]} for name, kind in kinds.items()}
    save_tiny(tmp_path / "model", blocks=7, rope_parameters=rope, **GEMMA3)
    text = {"calibration": tokens()} if dtype == "q4_0" else {}
    rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf", dtype=dtype, **text)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert settings(tmp_path / "x.gguf")["gemma3.context_length"] == 128  # and not that of a window
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    for name, norm in (("blk.3.attn_q_norm", "layers.3.self_attn.q_norm"), ("output_norm", "norm")):
        scale = 1 + dense.model.get_submodule(norm).weight.detach()
        torch.testing.assert_close(torch.from_numpy(there[f"{name}.weight"].data.copy()), scale)
    again = rankfold.load(tmp_path / "x.gguf", dtype="float32", device="cpu")
    for name in ("layer_types", "sliding_window", "query_pre_attn_scalar", "head_dim", "rope_parameters"):
        assert getattr(again.config, name) == getattr(dense.config, name), name
    assert ((logits(again) - logits(dense)).norm() / logits(dense).norm()).item() < (0.7 if text else 1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows in other blocks than five of six"),
        ({"query_pre_attn_scalar": 24}, "scores divided by the root of 24"),
        ({"final_logit_softcapping": 30.0}, "soft caps"),
        ({"attn_logit_softcapping": 50.0}, "soft caps"),
        ({"attention_bias": True}, "biases"),
        ({"use_bidirectional_attention": True}, "attention in both directions"),
    ],
)
def test_what_llama_cpp_lacks_of_a_gemma_is_refused(options, message, tmp_path):
    save_tiny(tmp_path / "model", blocks=2, **GEMMA3 | options)
    with pytest.raises(UnsupportedModelError, match=f"llama.cpp's gemma3 has no {message}, which this model has; use"):
        rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf")
    with pytest.raises(UnsupportedModelError, match="takes a model type out of llama, mistral, qwen2, got gemma3_text"):
        rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf-deci")


def test_a_tokenizer_that_splits_at_spaces_it_has_replaced_is_sentencepieces(tmp_path):
    save_tiny(tmp_path / "model", blocks=2)
    save_tokenizer_over_characters(tmp_path / "model", splits=True)
    rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf")
    found = settings(tmp_path / "x.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.add_space_prefix"]) == ("llama", False)


def test_a_gemma_of_62_blocks_divides_scores_as_the_one_of_27b_does(tmp_path):
    """transformers takes 256 for all files."""
    save_tiny(tmp_path / "model", blocks=62, **GEMMA3 | {"query_pre_attn_scalar": 8})  # 32 wide, 4 heads
    assert rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf").difference < 1e-5


def test_a_qwen_whose_frequencies_are_stretched_is_written_as_deci(tmp_path):
    save_tiny(tmp_path / "model", blocks=2, family="qwen2", rope_parameters=LLAMA3)
    assert rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf-deci").difference < 1e-5
    found = gguf.GGUFReader(tmp_path / "x.gguf")
    assert settings(tmp_path / "x.gguf")["general.architecture"] == "deci"
    assert {"rope_freqs.weight", "blk.1.attn_k.bias"} <= {tensor.name for tensor in found.tensors}


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_families_without_the_fields_of_a_llama_are_refused(family, tmp_path):
    small = rankfold.compress(
        opened(family),
        method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2),
        calibration=tokens(),
        output=tmp_path / "small",
    ).output
    for kind, more in (("deci", ""), ("gguf", ", qwen2, qwen3, gemma3_text"), ("gguf-deci", ", qwen2")):
        with pytest.raises(
            UnsupportedModelError, match=f"takes a model type out of llama, mistral{more}, got {family}"
        ):
            rankfold.export(small, tmp_path / "x", kind)


@pytest.mark.parametrize("form", ["gguf", "gguf-deci", "deci"])
def test_a_llama_that_sees_is_refused(form, tmp_path):
    small = rankfold.compress(
        tiny_pairs.opened("llava"), 0.3, method="modegpt", calibration=tokens(), output=tmp_path / "small"
    ).output
    with pytest.raises(UnsupportedModelError, match="of text alone, and small is a LlavaForConditionalGeneration; use"):
        rankfold.export(small, tmp_path / "made", format=form)


def test_a_tokenizer_that_has_no_name_in_llama_cpp_or_is_not_there_is_refused(place, tmp_path):
    for change in ({"type": "Whitespace"}, None):
        shutil.copytree(place / "small", tmp_path / "small", dirs_exist_ok=True)
        file = tmp_path / "small" / "tokenizer.json"
        if change:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": change}))
            with pytest.raises(UnsupportedModelError, match=r"\(BPE, cut by \('Whitespace',\)\) has no GGUF form"):
                rankfold.export(tmp_path / "small", tmp_path / "x.gguf", "gguf")
        else:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (tmp_path / "small" / name).unlink()
            with pytest.raises(CheckpointError, match="there is no tokenizer in"):
                rankfold.export(tmp_path / "small", tmp_path / "x.gguf", "gguf")
        assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_q8_0_is_for_gguf_files(place, tmp_path):
    with pytest.raises(OptionError, match="format stock has no dtype q8_0; choose auto, float32"):
        rankfold.export(place / "small", tmp_path / "x", dtype="q8_0")


@pytest.mark.parametrize("dtype, values", [("q4_0", "Q5_0"), ("q5_0", "Q8_0")])
def test_blocks_are_rounded_for_what_they_receive(place, tmp_path, dtype, values):
    rankfold.export(place / "model", tmp_path / "x.gguf", "gguf", dtype=dtype, calibration=tokens())
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    of_block = {name.split(".")[2]: kind for name, kind in kinds.items() if name.startswith("blk.1.")}
    assert kinds["output.weight"] == "Q8_0" and kinds["token_embd.weight"] == values
    assert of_block == {
        "attn_norm": "F32",
        "ffn_norm": "F32",
        **dict.fromkeys(["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"], dtype.upper()),
        "attn_v": values,
        "ffn_down": "F16",  # rows that are not whole blocks
    }
    assert settings(tmp_path / "x.gguf")["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]


def test_an_embedding_that_is_the_head_stays_in_eight_bits(tmp_path):
    save_tiny(tmp_path / "model", blocks=1, tie_word_embeddings=True)
    rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf", dtype="q4_0", calibration=tokens())
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert kinds["token_embd.weight"] == "Q8_0" and "output.weight" not in kinds


def test_a_block_is_rounded_for_what_the_rounded_ones_before_it_send(tmp_path):
    """The reference runs the model of the file as far as a block, and rounds that one."""
    save_tiny(tmp_path / "model", blocks=2)
    rankfold.export(tmp_path / "model", tmp_path / "x.gguf", "gguf", dtype="q4_0", calibration=tokens(4))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    own = dense.model.layers[1]
    model.model.layers[1].load_state_dict(own.state_dict())
    model.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    found = gguf.GGUFReader(tmp_path / "x.gguf")
    (written,) = [tensor for tensor in found.tensors if tensor.name == "blk.1.ffn_up.weight"]
    alike = []  # bytes that are the same, of all; blocks may run in bf16
    for network in (model, dense):
        received = LayerInput(network.model.layers[1].mlp.up_proj)
        with watched(received), torch.no_grad():
            network(tokens(4).ids)
        x = received.take().flatten(0, 1).double()
        expected = round_to_blocks(own.mlp.up_proj.weight.detach(), rounding_order(x.mT @ x / len(x)), levels=8)
        alike.append((written.data == packed(expected, "q4_0")).mean())
    assert alike[0] > 0.95 and alike[1] < 0.9


def test_text_is_for_dtypes_that_are_rounded_for_it(place, tmp_path):
    for dtype in ("q8_0", "float16"):
        with pytest.raises(
            OptionError, match=f"calibration would have no effect.* only q5_0 and q4_0 .* got dtype='{dtype}'"
        ):
            rankfold.export(place / "small", tmp_path / "x", "gguf", dtype=dtype, calibration=tokens())
    with pytest.raises(OptionError, match="num_samples and seed would have no effect"):
        rankfold.export(place / "small", tmp_path / "x", num_samples=4, seed=1)
    with pytest.raises(OptionError, match="format deci has no dtype q4_0; choose auto, float32"):
        rankfold.export(place / "small", tmp_path / "x", "deci", dtype="q4_0")
    for format, more in (("gguf", ", q8_0, q5_0, q4_0"), ("stock", "")):
        with pytest.raises(OptionError, match=f"dtype must be auto, float32, bfloat16, float16{more}; got 'q4_1'"):
            rankfold.export(place / "small", tmp_path / "x", format, dtype="q4_1")
    assert not (tmp_path / "x").exists()


def test_a_dense_model_becomes_a_file_too(place, tmp_path):
    result = rankfold.export(place / "model", tmp_path / "x.gguf", "gguf")
    assert result.dense == result.compressed == result.exported and result.kept == 1


@pytest.mark.parametrize("form", ["gguf", "gguf-deci"])
@pytest.mark.parametrize("window", [8, 63, 64, None])
def test_a_sliding_window_ends_the_context_and_is_read_back_within_it(tmp_path, form, window):
    """Neither arch has one; what lies further back is hidden from the model alone."""
    save_tiny(tmp_path / "llama", blocks=3)
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    facts = {
        name: value for name, value in llama.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**facts | {"sliding_window": window}))
    model.load_state_dict(llama.state_dict())
    (tmp_path / "model").mkdir()
    shutil.copytree(tmp_path / "llama", tmp_path / "model", dirs_exist_ok=True)
    model.save_pretrained(tmp_path / "model")
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    rankfold.compress(
        source,
        method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2),
        calibration=tokens(),
        output=tmp_path / "small",
        mode="one-pass",
    )
    assert rankfold.export(tmp_path / "small", tmp_path / "x.gguf", form).difference < 1e-3
    found = settings(tmp_path / "x.gguf")
    assert found[f"{found['general.architecture']}.context_length"] == (window or 128)
