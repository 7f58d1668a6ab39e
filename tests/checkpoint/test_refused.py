"""A checkpoint that does not hold what its config describes is refused in one line that names what is wrong."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import rankfold
from families import some_ids, tiny_model, tokens
from rankfold.errors import CheckpointError, NumericsError, RankfoldError, UnsupportedModelError

UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, family: str = "llama") -> Path:
    tiny_model(family).save_pretrained(folder)
    return folder


def change(folder: Path, edit, file: str = "model.safetensors") -> None:
    """Rewrite the tensors of a file."""
    state = load_file(folder / file)
    state = edit(state) or state
    save_file({k: v.contiguous() for k, v in state.items()}, folder / file, metadata={"format": "pt"})


def configure(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop(*names):
    return lambda state: {k: v for k, v in state.items() if k not in names}


DAMAGE = {
    "one tensor missing": (drop(UP), {}, rf"lacks {UP}"),
    "a block missing": (
        lambda s: {k: v for k, v in s.items() if ".layers.2." not in k},
        {},
        r"lacks model\.layers\.2\.input_layernorm\.weight.* and 4 more",
    ),
    "tensors renamed": (
        lambda s: {k.replace("up_proj", "upward"): v for k, v in s.items()},
        {},
        r"lacks model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1\.mlp\.up_proj\.weight, model",
    ),
    "more layers": (None, {"num_hidden_layers": 4}, r"lacks model\.layers\.3\.input_layernorm\.weight.* and 4 more"),
    "a wrong shape": (
        lambda s: s | {UP: s[UP][:40]},
        {},
        rf"{UP} (has shape )?\[40, 32\] in(stead of| .*safetensors, and) \[48, 32\]",
    ),
    "another width": (None, {"intermediate_size": 40}, r"\[48, 32\] in(stead of| .*and) \[40, 32\]|\[32, 48\] in"),
    "no head, and not tied": (drop("lm_head.weight"), {}, r"lacks lm_head\.weight"),
}


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_dense_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path, damage, use):
    edit, fields, message = DAMAGE[damage]
    folder = saved(tmp_path / "dense")
    if edit:
        change(folder, edit)
    configure(folder, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        use(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_dropping_the_tie_of_a_tied_checkpoint_is_refused(tmp_path):
    folder = saved(tmp_path / "tied", "llama-mha-tied")
    configure(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight; correct config\.json"):
        rankfold.open_model(folder, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_tensors_that_nothing_uses_are_named(tmp_path, caplog, use):
    folder = saved(tmp_path / "dense")
    unused = (
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "vision.layers.7.weight",
        "extra",
    )  # older, larger checkpoints
    change(folder, lambda s: s | {name: torch.ones(2) for name in unused})
    with caplog.at_level(logging.WARNING, "rankfold"):
        use(folder, device="cpu")
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("rankfold")]
    assert re.search(r"no use for are left out: extra, (model\.layers\.1\.\S+, )?vision\.layers\.7\.weight$", line)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_hidden_layers": 2}, r"leaves out model\.layers\.2\.input_layernorm\.weight.* and \d+ more"),
        ({"num_hidden_layers": 0}, r"leaves out model\.layers\.0\.input_layernorm\.weight.* and \d+ more"),
        (
            {"attention_bias": False},
            r"leaves out model\.layers\.0\.self_attn\.\w_proj\.bias.* and 7 more; correct config",
        ),
    ],
)
@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_weights_of_blocks_that_the_config_leaves_out_are_refused(tmp_path, fields, message, use):
    folder = saved(tmp_path / "dense", "llama-bias")
    configure(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        use(folder, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_a_model_of_two_billion_blocks_is_not_built(tmp_path, use):
    folder = saved(tmp_path / "dense")
    configure(folder, num_hidden_layers=2**31)
    with pytest.raises(
        CheckpointError, match=r"dense holds 30 tensors, and has 2147483648 blocks by the config; correct"
    ):
        use(folder, device="cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight"])
@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_weights_that_are_no_floats_are_refused(tmp_path, name, dtype, use):
    folder = saved(tmp_path / "dense")
    change(folder, lambda s: s | {name: s[name].to(dtype)})
    with pytest.raises(
        CheckpointError, match=rf"{name} holds \w+ in .*, and must hold floating-point numbers; download"
    ):
        use(folder, device="cpu")


@pytest.mark.parametrize(
    "name, dtype",
    [("mlp.up_proj.weight", torch.int8), ("rotary_pairs", torch.float32)],
)
def test_numbers_of_another_kind_in_a_compressed_checkpoint_are_refused(compressed, tmp_path, name, dtype):
    folder, shard = copied(compressed, "modegpt", tmp_path / "small")
    name = ending(load_file(folder / shard), name)
    change(folder, lambda s: s | {name: s[name].to(dtype)}, shard)
    with pytest.raises(
        CheckpointError, match=rf"{name} holds \w+ in .*, and must hold (floating-point numbers|integers);"
    ):
        rankfold.load(folder, device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path, value):
    folder = saved(tmp_path / "dense")
    change(folder, lambda s: s | {UP: s[UP].index_fill(0, torch.tensor([3]), value)})
    with pytest.raises(NumericsError, match=f"weight {UP} has 32 NaN or infinite entries"):
        rankfold.load(folder, device="cpu")


def test_a_config_that_stores_in_a_type_weights_do_not_have_is_refused(tmp_path):
    folder = saved(tmp_path / "dense")
    configure(folder, dtype="float8_e4m3fn")
    with pytest.raises(
        CheckpointError, match="names the dtype float8_e4m3fn, which is not one of float32, .* with dtype$"
    ):
        rankfold.open_model(folder, device="cpu")
    rankfold.open_model(folder, dtype="bfloat16", device="cpu")


def test_a_model_without_blocks_is_refused(tmp_path):
    folder = saved(tmp_path / "dense")
    change(folder, lambda s: {k: v for k, v in s.items() if ".layers." not in k})
    configure(folder, num_hidden_layers=0)
    with pytest.raises(CheckpointError, match=r"dense has no blocks by its config; correct num_hidden_layers"):
        rankfold.open_model(folder, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_damaged_settings_for_generating_are_refused(tmp_path, use):
    folder = saved(tmp_path / "dense")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read \(.*\); correct or remove it"):
        use(folder, device="cpu")
    (folder / "generation_config.json").unlink()
    use(folder, device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_folder_without_a_tokenizer_says_so(tmp_path, family):
    """For the newer families transformers makes up a tokenizer that knows no words."""
    source = rankfold.open_model(saved(tmp_path / "dense", family), device="cpu")
    with pytest.raises(
        CheckpointError, match=r"there is no tokenizer in .*dense; put the tokenizer files next to the weights"
    ):
        rankfold.load_calibration("pydoc", source)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b'{"weight_map": ' + b"[" * 100000])
@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_an_index_that_is_no_json_is_refused(tmp_path, content, use):
    folder = saved(tmp_path / "dense")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged \(.*\); download or copy it again"):
        use(folder, device="cpu")


@pytest.mark.parametrize(
    "family",
    ["mixtral", "gemma3-images", "gpt2", "bloom", "falcon-mqa", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"],
)
def test_checkpoints_under_other_names_still_open(tmp_path, family):
    folder = saved(tmp_path / "dense", family)
    ids = some_ids()
    with torch.no_grad():
        expected = tiny_model(family)(ids).logits
        got = rankfold.open_model(folder, device="cpu").whole_model()(ids).logits
    torch.testing.assert_close(got, expected)


def test_a_head_that_differs_from_the_embedding_it_should_be_tied_to_is_kept(tmp_path, caplog):
    """Stock transformers is the reference: it computes with both."""
    folder = saved(tmp_path / "tied", "llama-mha-tied")
    other = torch.randn(96, 32)
    change(folder, lambda s: s | {"lm_head.weight": other})
    with caplog.at_level(logging.WARNING, "rankfold"):
        source = rankfold.open_model(folder, device="cpu")
    assert "the head differs from the embedding it should be tied to; both are kept, untied" in caplog.text
    assert source.streamed
    source.autocast = None
    rankfold.compress(source, method=rankfold.MoDeGPT(sparsity=0.0), calibration=tokens(), output=tmp_path / "small")
    ids = some_ids()
    with torch.no_grad():
        expected = t.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        got = rankfold.load(tmp_path / "small", device="cpu")(ids).logits
        dense = rankfold.load(folder, device="cpu")(ids).logits
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(dense, expected)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_equal_head_beside_a_tied_embedding_is_no_news(tmp_path, caplog):
    folder = saved(tmp_path / "tied", "llama-mha-tied")
    change(folder, lambda s: s | {"lm_head.weight": s["model.embed_tokens.weight"].clone()})
    with caplog.at_level(logging.WARNING, "rankfold"):
        source = rankfold.open_model(folder, device="cpu")
    assert not caplog.text and source.model.config.tie_word_embeddings


def test_a_model_in_memory_that_says_it_is_tied_and_is_not_is_refused():
    model = tiny_model("llama-mha-tied")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))
    with pytest.raises(
        UnsupportedModelError, match=r"lm_head\.weight differs from .* set config\.tie_word_embeddings=False"
    ):
        rankfold.open_model(model, device="cpu")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A MoDeGPT checkpoint of a Llama and LatentLLM ones of an OPT, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("compressed")
    made = {
        "modegpt": ("llama", "modegpt", {}),
        "latent": ("opt", "latentllm", {}),
        "sparse": ("opt", "latentllm", {"sparse": 0.1}),
        "alone": ("opt", "latentllm", {"sparse": 1.0}),
        "heads": ("opt", "latentllm", {"head_junction": True}),
    }
    for name, (family, method, options) in made.items():
        source = rankfold.open_model(tiny_model(family), device="cpu")
        source.autocast = None
        chosen = rankfold.make_method(method, sparsity=0.3, rank_multiple=2, **options)
        rankfold.compress(source, method=chosen, calibration=tokens(), output=folder / name)
    return folder


def copied(compressed: Path, name: str, to: Path) -> tuple[Path, str]:
    """A copy, and the name of its second shard."""
    import shutil

    shutil.copytree(compressed / name, to)
    return to, sorted(p.name for p in to.glob("model-*.safetensors"))[1]


def ending(state, end: str) -> str:
    return next(name for name in sorted(state) if name.endswith(end))


@pytest.mark.parametrize("name", ["modegpt", "latent"])
def test_a_compressed_checkpoint_without_its_modules_is_refused(compressed, tmp_path, name):
    folder, _ = copied(compressed, name, tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules"] = {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"description of the modules in config\.json is not the one that was written"
    ):
        rankfold.load(folder, device="cpu")
    del config["quantization_config"]["digest"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"does not fit its config: it (lacks|has the wrong shape of) model\.|, and \[32, 32\] by the config",
    ) as caught:
        rankfold.load(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dense", "modegpt"])
def test_nothing_is_as_large_as_a_config_says_before_the_files_were_asked(compressed, tmp_path, monkeypatch, name):
    if name == "dense":
        folder = tmp_path / "small"
        tiny_model("llama").save_pretrained(folder)
    else:
        folder, _ = copied(compressed, name, tmp_path / "small")
    configure(folder, vocab_size=2**24)
    monkeypatch.setattr(t.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(CheckpointError, match=r"has shape \[96, 32\] in .*, and \[16777216, 32\] by the config"):
        rankfold.load(folder)


@pytest.mark.parametrize("read", [rankfold.load, rankfold.open_model])
@pytest.mark.parametrize(
    "lacking, expected",
    [(UP, r"has shape \[96, 32\] in"), ("model.embed_tokens.weight", "numbers, and the config describes 1,0")],
)
def test_nor_where_a_tensor_is_not_in_the_files(tmp_path, monkeypatch, read, lacking, expected):
    folder = saved(tmp_path / "small")
    change(folder, drop(lacking, "lm_head.weight"))
    configure(folder, vocab_size=2**24)
    monkeypatch.setattr(t.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(t.LlamaForCausalLM, "from_pretrained", None)
    with pytest.raises(CheckpointError, match=expected):
        read(folder)


def test_a_config_without_positions_is_refused(compressed, tmp_path):
    folder, _ = copied(compressed, "modegpt", tmp_path / "small")
    for positions in (-7, 0):
        configure(folder, max_position_embeddings=positions)
        for read in (rankfold.load, rankfold.open_model):
            with pytest.raises(CheckpointError, match=f"has {positions} positions by its config; correct max_pos"):
                read(folder)


@pytest.mark.parametrize("change", [{"scaling": 0.3}, {"rotary_dim": 6}, {"softcap": {}}, {"heads": 2}, {"extra": 1}])
def test_a_description_that_was_changed_is_refused(compressed, tmp_path, change):
    """Sizes show in the weights; a scale does not. Stock transformers is told, too."""
    folder, _ = copied(compressed, "modegpt", tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules"]["model.layers.1.self_attn"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    for load in (rankfold.load, t.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(
            (CheckpointError, ValueError), match="is not the one that was written|of (an|this) attention must"
        ):
            load(folder)


def test_a_rotary_table_of_another_size_is_refused(compressed, tmp_path):
    folder, _ = copied(compressed, "modegpt", tmp_path / "small")
    configure(folder, head_dim=16)
    with pytest.raises(
        CheckpointError, match=r"self_attn turns 8 dimensions, and the model by its config 16; config\.json"
    ):
        rankfold.load(folder)


def test_a_head_of_its_own_in_a_tied_compressed_checkpoint_is_refused(tmp_path):
    source = rankfold.open_model(tiny_model("llama-mha-tied"), device="cpu")
    folder = rankfold.compress(
        source, method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2), calibration=tokens(), output=tmp_path / "small"
    ).output
    shard = sorted(folder.glob("*.safetensors"))[-1].name
    change(folder, lambda state: state | {"lm_head.weight": torch.ones(96, 32)}, shard)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"small has a head of its own, and its config ties it to the embedding"):
        rankfold.load(folder, device="cpu")


@pytest.mark.parametrize("end", ["columns", "up_proj.weight", "rotary_pairs", "A.weight"])
def test_a_compressed_checkpoint_without_a_tensor_is_refused(compressed, tmp_path, end):
    folder, shard = copied(
        compressed, "modegpt" if end in ("up_proj.weight", "rotary_pairs") else "latent", tmp_path / "s"
    )
    name = ending(load_file(folder / shard), end)
    change(folder, drop(name), shard)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        rankfold.load(folder, device="cpu")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        rankfold.load(folder, device="cpu")


INDICES = {
    ("latent", "columns"): (lambda x: x * 0, "columns is no permutation of 0 to"),
    ("latent", "rows"): (lambda x: x - 1, "rows is no permutation of 0 to"),
    ("modegpt", "rotary_pairs"): (lambda x: x + 100, r"rotary_pairs has entries 10\d to 10\d, allowed are 0 to 4"),
    ("sparse", "sparse.columns"): (lambda x: x - 60, r"sparse\.columns has entries -\d+ to -?\d+, allowed are 0 to"),
    ("sparse", "sparse.starts"): (lambda x: x.flip(0), r"sparse\.starts do not rise from 0 to \d+"),
    ("alone", "sparse.columns"): (lambda x: x + 60, r"sparse\.columns has entries \d+ to \d+, allowed are 0 to"),
    ("alone", "sparse.starts"): (lambda x: x * 0, r"sparse\.starts do not rise from 0 to \d+"),
    ("heads", "order"): (lambda x: x * 0, "order is no permutation of 0 to"),
}


@pytest.mark.parametrize("kind, end", sorted(INDICES))
def test_an_index_that_leads_outside_is_refused(compressed, tmp_path, kind, end):
    if end == "rows":
        source = rankfold.open_model(tiny_model("opt"), device="cpu")
        chosen = rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, junction="block_identity_left")
        folder = rankfold.compress(source, method=chosen, calibration=tokens(), output=tmp_path / "small").output
        shard = "model-00002-of-00004.safetensors"
    else:
        folder, shard = copied(compressed, kind, tmp_path / "small")
    edit, message = INDICES[kind, end]
    name = ending(load_file(folder / shard), end)
    change(folder, lambda s: s | {name: edit(s[name])}, shard)
    for load in (rankfold.load, t.AutoModelForCausalLM.from_pretrained):
        with pytest.raises((CheckpointError, ValueError), match=message):
            load(folder)


@pytest.mark.parametrize("elsewhere", ["../other.safetensors", "/etc/hostname", "..", "sub/a.safetensors", 3])
@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, elsewhere, use):
    folder = saved(tmp_path / "dense")
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    weights.rename(tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, elsewhere)}))
    with pytest.raises(CheckpointError, match=r"index\.json names .*: not a file in this folder"):
        use(folder, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_a_pipe_in_place_of_weights_is_refused_and_not_waited_for(tmp_path, use):
    folder = saved(tmp_path / "dense")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a plain file"):
        use(folder, device="cpu")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    folder = saved(tmp_path / "dense")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = list(load_file(folder / "a.safetensors"))
    save_file({names[0]: torch.ones(1), "more": torch.ones(1)}, folder / "b.safetensors")
    files = dict.fromkeys(names, "a.safetensors") | {"more": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=r"is in .*a\.safetensors and in .*b\.safetensors; remove one of them"):
        rankfold.open_model(folder, device="cpu")


def test_an_index_that_promises_what_its_files_do_not_hold_is_refused(tmp_path):
    folder = saved(tmp_path / "dense")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = [*load_file(folder / "a.safetensors"), "model.more"]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
    )
    with pytest.raises(CheckpointError, match=r"index\.json names model\.more, and the files do not hold it there"):
        rankfold.open_model(folder, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_code_in_a_checkpoint_is_never_asked_about(tmp_path, monkeypatch, use):
    folder = saved(tmp_path / "dense")
    code = {name: f"code.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    configure(folder, model_type="unheard_of", auto_map=code)
    (folder / "code.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(RankfoldError) as caught:
        use(folder, device="cpu")
    assert "\n" not in str(caught.value)
