"""Every family's compressed model as a stock model: read by transformers alone, same logits, as narrow as can be."""

import json

import pytest
import torch
import transformers

import rankfold
import tiny_pairs
from families import CONFIGS, EXPERTS, opened, some_ids, tiny_model, tokens
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.exports.form import StockModel, plain
from rankfold.exports.rotary import turning_by

AS_LARGE = {"bloom", "mpt"}  # whose classes say how wide everything is


def compressed(family: str, folder, method: str = "modegpt", **options):
    share = 0.1 if family in EXPERTS else 0.3
    chosen = rankfold.make_method(method, **{"sparsity": share, "rank_multiple": 2} | options)
    return rankfold.compress(
        opened(family), method=chosen, calibration=tokens(), output=folder / "small", mode="one-pass"
    ).output


@torch.no_grad()
def logits(model):
    return model.eval()(some_ids()).logits


def stock(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


@pytest.fixture(scope="module", params=sorted(set(CONFIGS) - AS_LARGE - EXPERTS))  # of experts: test_experts.py
def family(request):
    return request.param


@pytest.fixture(scope="module")
def done(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    small = compressed(family, folder)
    return folder, rankfold.load(small, device="cpu"), rankfold.export(small, folder / "stock")


def test_transformers_alone_reads_it_and_computes_the_same(done):
    folder, small, result = done
    model = stock(folder / "stock")
    assert type(model).__module__.startswith("transformers.") and not hasattr(model.config, "quantization_config")
    assert not any(type(module).__module__.startswith("rankfold") for module in model.modules())
    torch.testing.assert_close(logits(model), logits(small), rtol=1e-4, atol=1e-5)
    assert result.difference < 1e-5
    assert sum(p.numel() for p in model.parameters()) == result.exported
    assert not (folder / "stock" / "modeling_rankfold.py").exists()
    card = (folder / "stock" / "README.md").read_text()
    assert (
        all(f"{count:,}" in card for count in (result.dense, result.compressed, result.exported))
        and "`modegpt`" in card
    )


def test_the_counts_are_those_of_the_three_models(family, done):
    _, small, result = done
    dense = sum(p.numel() for p in opened(family).model.parameters())
    assert (result.dense, result.compressed) == (dense, sum(p.numel() for p in small.parameters()))
    assert result.compressed < result.exported < result.dense and 0 < result.kept < 1


def test_mlps_are_as_wide_as_the_widest_and_heads_as_their_class_can(family, done):
    folder, small, _ = done
    source, wide = rankfold.open_model(folder / "stock", device="cpu"), opened(family).block(0).attention
    modules = small.config.quantization_config.modules
    path = source.architecture.mlp.down
    widest = max(spec["in"] for name, spec in modules.items() if name.endswith(path))
    heads = {source.block(index).attention.head_dim for index in range(3)}
    width = wide.head_dim
    if all(opened(family).block(index).attention.takes_pairs for index in range(3)):
        left = [module for module in small.modules() if getattr(module, "rotary_pairs", None) is not None]
        used = {pair for module in left for pair in module.rotary_pairs.flatten().tolist()}
        width = min(
            width, max(2 * len(used), *(module.vo_dim for module in left))
        )  # of Gemma's three heads a pair is gone
    assert all(source.block(index).mlp.hidden == widest < 48 for index in range(3))
    assert heads == {width}


def test_it_writes_the_same_text(family, done):
    folder, small, _ = done
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = [model.generate(some_ids(), **options) for model in (small, stock(folder / "stock"))]
    assert torch.equal(*texts)


def test_heads_that_turn_only_in_part_become_narrower_and_the_scale_goes_with_the_queries(tmp_path):
    """Phi turns half of a head. Where nobody keeps the other half, heads can lose it, and its config can say so."""
    model = tiny_model("phi")
    for block in model.model.layers:
        for layer in (block.self_attn.q_proj, block.self_attn.k_proj):
            for parameter in layer.parameters():
                parameter.data.unflatten(0, (4, 8))[:, 4:] = 0
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    method = rankfold.MoDeGPT(modules={"qk": 0.5, "vo": 0.5}, rank_multiple=2)
    rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "small", mode="one-pass")
    result = rankfold.export(tmp_path / "small", tmp_path / "stock")
    config = stock(tmp_path / "stock").config
    assert config.head_dim == 4 and config.rope_parameters["partial_rotary_factor"] == 1
    assert result.exported - result.compressed == 3 * 4 * 4  # value biases, which had moved into those of the outputs
    small = rankfold.load(tmp_path / "small", device="cpu")
    torch.testing.assert_close(logits(stock(tmp_path / "stock")), logits(small), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_class_that_takes_few_pairs_has_heads_of_any_width_and_turns_them_by_these(family):
    source = opened(family)
    full = source.block(0).attention
    if not full.takes_pairs:
        return
    pairs, dense = [1, 3], source.inv_freq(0)
    config = plain(source.model.config)
    text = config.get_text_config()
    text.head_dim, text.rope_parameters = 4, turning_by(dense[pairs], text)
    form = StockModel(config, source.architecture, {})
    model = form.empty()
    stock = form.view(model, 0).attention
    assert (stock.head_dim, stock.rotary_dim, stock.heads) == (4, 4, full.heads)
    again = rankfold.open_model(type(model)(config), device="cpu")
    torch.testing.assert_close(again.inv_freq(0), dense[pairs])
    ids = torch.zeros(1, 2 * config.get_text_config().max_position_embeddings, dtype=torch.long)
    again.model(ids)  # of a text longer than any it was made for
    torch.testing.assert_close(again.inv_freq(0), dense[pairs])


@pytest.mark.parametrize("family", ["llama-bias", "gemma2", "granitemoe", "ernie4_5", "cohere"])
def test_heads_that_all_turn_by_the_same_pairs_are_narrow(family, tmp_path):
    small = compressed(family, tmp_path, head_dim=4)
    result = rankfold.export(small, tmp_path / "stock")
    model = stock(tmp_path / "stock")
    assert model.config.head_dim == 4 and result.difference < 1e-5
    torch.testing.assert_close(logits(model), logits(rankfold.load(small, device="cpu")), rtol=1e-4, atol=1e-5)
    bias = {"llama-bias": 3 * 2 * 4, "ernie4_5": 3 * 2 * 4}  # of values, which had moved into that of the output
    left = result.exported - result.compressed
    assert left == bias.get(family, 0) or family == "granitemoe"  # where experts are as wide as the widest


def test_pairs_that_no_head_has_any_more_are_not_in_the_stock_model(tmp_path):
    """Whatever chose them: here every head lost the second of its four, and values as many dimensions."""
    model = tiny_model("llama")
    for block in model.model.layers:
        for layer in (block.self_attn.q_proj, block.self_attn.k_proj):
            layer.weight.data.unflatten(0, (-1, 8))[:, [1, 5]] = 0
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    method = rankfold.MoDeGPT(modules={"qk": 0.25, "vo": 0.5}, rank_multiple=2)
    rankfold.compress(source, method=method, calibration=tokens(), output=tmp_path / "small", mode="one-pass")
    rankfold.export(tmp_path / "small", tmp_path / "stock")
    found = stock(tmp_path / "stock")
    assert found.config.head_dim == 6
    torch.testing.assert_close(rankfold.open_model(found, device="cpu").inv_freq(0), source.inv_freq(0)[[0, 2, 3]])
    small = rankfold.load(tmp_path / "small", device="cpu")
    torch.testing.assert_close(logits(found), logits(small), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", sorted(AS_LARGE))
def test_a_form_as_large_as_the_dense_model_is_refused(family, tmp_path):
    small = compressed(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"can have, small would be as large as the dense model"):
        rankfold.export(small, tmp_path / "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3", "phi3", "gpt2", "falcon-gqa"])
def test_fewer_heads(family, tmp_path):
    """Where the class says how wide heads are there are as many as the block with the most has; elsewhere zeros."""
    small = compressed(family, tmp_path, "strided", modules={"heads": 0.5, "mlp": 0.2})
    rankfold.export(small, tmp_path / "stock")
    model = stock(tmp_path / "stock")
    torch.testing.assert_close(logits(model), logits(rankfold.load(small, device="cpu")), rtol=1e-4, atol=1e-5)
    assert model.config.num_attention_heads == (4 if family in ("gpt2", "falcon-gqa") else 2)


def test_biases_that_a_method_adds_have_a_place_or_are_refused(tmp_path):
    for family in ("llama", "qwen2"):
        (tmp_path / family).mkdir()
    small = compressed("llama", tmp_path / "llama", "flap")
    rankfold.export(small, tmp_path / "stock")
    model = stock(tmp_path / "stock")
    assert model.config.attention_bias and model.config.mlp_bias
    torch.testing.assert_close(logits(model), logits(rankfold.load(small, device="cpu")), rtol=1e-4, atol=1e-5)
    small = compressed("qwen2", tmp_path / "qwen2", "flap")
    with pytest.raises(UnsupportedModelError, match=r"o_proj has a bias, and the stock class has no place for one"):
        rankfold.export(small, tmp_path / "not")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "qwen2", "stock"]


@pytest.mark.parametrize("family, options", [("llama", {}), ("llama", {"joint": "qk,vo"}), ("opt", {"sparse": 1.0})])
def test_factors_and_sparse_layers_are_refused(family, options, tmp_path):
    small = compressed(family, tmp_path, "latentllm", **options)
    with pytest.raises(UnsupportedModelError, match=r"which no stock model has; serve the folder as it is"):
        rankfold.export(small, tmp_path / "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_norms_over_dimensions_that_are_gone_are_refused(family, tmp_path):
    small = compressed(family, tmp_path, modules=("qk", "vo"))
    with pytest.raises(
        UnsupportedModelError, match=r"which no stock model does; .* compress with modules=\('mlp', 'vo'\)$"
    ):
        rankfold.export(small, tmp_path / "stock")


def test_what_is_a_stock_model_already_is_said(tmp_path):
    method = rankfold.make_method("shortgpt", sparsity=0.3)
    small = rankfold.compress(opened("llama"), method=method, calibration=tokens(), output=tmp_path / "small").output
    with pytest.raises(OptionError, match="small is a stock model already"):
        rankfold.export(small, tmp_path / "stock")


def test_a_model_that_lost_blocks_is_compared_with_the_dense_one(tmp_path):
    dense, small = opened("llama"), tmp_path / "small"
    rankfold.compress(dense, 0.3, method="shortgpt", calibration=tokens(), output=small)
    result = rankfold.export(small, tmp_path / "deci", "deci")
    whole = sum(p.numel() for p in dense.model.parameters())
    assert result.dense == whole > result.compressed == result.exported and result.kept == 1
    card = (tmp_path / "deci" / "README.md").read_text()
    assert f"| dense | {whole:,} |" in card and "compressed by `shortgpt`" in card


def test_the_dtype_is_as_stored_or_as_asked(tmp_path):
    source = rankfold.open_model(opened("llama").model.to(torch.bfloat16), device="cpu")
    rankfold.compress(
        source,
        method=rankfold.MoDeGPT(rank_multiple=2),
        calibration=tokens(),
        output=tmp_path / "small",
        mode="one-pass",
    )
    for dtype, written in (("auto", torch.bfloat16), ("float16", torch.float16)):
        rankfold.export(tmp_path / "small", tmp_path / dtype, dtype=dtype)
        model = stock(tmp_path / dtype)
        assert model.dtype == written and json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == str(
            written
        ).removeprefix("torch.")
    same = (
        logits(stock(tmp_path / "auto").float()),
        logits(rankfold.load(tmp_path / "small", dtype="float32", device="cpu")),
    )
    torch.testing.assert_close(*same, rtol=1e-4, atol=1e-5)


def test_an_export_that_computes_something_else_gets_no_name(tmp_path, monkeypatch):
    small = compressed("llama", tmp_path)
    from rankfold.exports import padding

    monkeypatch.setattr(padding, "scatter_heads", lambda x, places, width: padding.pad_units(x, len(places) * width))
    with pytest.raises(CheckpointError, match="computes other logits"):
        rankfold.export(small, tmp_path / "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_an_unknown_format_and_an_output_that_is_there_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"unknown format 'stok'; did you mean 'stock'\? available: stock"):
        rankfold.export(tmp_path, tmp_path / "x", "stok")
    with pytest.raises(CheckpointError, match="exists already"):
        rankfold.export(tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match="x.gguf cannot be read as GGUF"):
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        rankfold.export(tmp_path / "x.gguf", tmp_path / "y")


def test_the_card_of_a_model_that_sees_names_its_task(tmp_path):
    small = rankfold.compress(
        tiny_pairs.opened("llava"), 0.3, method="modegpt", calibration=tokens(), output=tmp_path / "small"
    ).output
    rankfold.export(small, tmp_path / "stock")
    for folder in (small, tmp_path / "stock"):
        assert "pipeline_tag: image-text-to-text\n" in (folder / "README.md").read_text()
