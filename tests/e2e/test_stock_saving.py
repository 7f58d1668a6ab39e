"""What an export leaves of the saving is said by `compress` and `export`, with the options that keep it at a cost."""

import json
import re
import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

import rankfold
from families import GQA, opened, some_ids, tokens
from rankfold.cli.summary import engine_of, options_for_target
from rankfold.compression.budget import rank_options
from rankfold.compression.importance import DenseMeasures
from rankfold.exports.kept import stock_parameters
from rankfold.exports.vllm import why_refused
from saved import save_tiny

TEXT = "--calibration pydoc --num-samples 4 --max-length 32 --rank-multiple 2"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    save_tiny(folder / "model", blocks=3)
    return folder


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", rankfold.Rankfold(sparsity=0.3, rank_multiple=2)),
        ("llama", rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2, modules=("mlp", "vo"))),
        ("llama", rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2, head_dim=6)),
        ("opt", rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)),
        ("phi", rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)),
        ("mixtral", rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_count_without_weights_is_that_of_the_export(family, method, tmp_path):
    small = rankfold.compress(opened(family), method=method, calibration=tokens(), output=tmp_path / "small").output
    assert stock_parameters(small) == rankfold.export(small, tmp_path / "stock").exported


def test_dense_blocks_and_experts_keep_widths_of_their_own_in_a_stock_model(tmp_path):
    """A config has a field for each: what experts can have is a quarter of a dense block."""
    widths = {"intermediate_size": 96, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    config = Qwen2MoeConfig(**{**GQA, **widths}, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    options = {"sparsity": 0.25, "target": "stock", "allocation": "uniform", "rank_multiple": 4}
    small = rankfold.compress(tmp_path / "dense", calibration=tokens(), output=tmp_path / "small", **options).model
    rankfold.export(tmp_path / "small", tmp_path / "stock", format="stock")
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), some_ids()
    assert torch.equal(stock(ids).logits, small(ids).logits)
    assert sum(p.numel() for p in stock.parameters()) == sum(p.numel() for p in small.parameters())
    left = {name: getattr(stock.config, name) / width for name, width in widths.items()}
    assert all(0.6 < share < 0.8 for share in left.values()), left


def test_what_no_stock_model_expresses_has_no_count(tmp_path):
    latent = rankfold.compress(
        opened("llama"), method="latentllm", calibration=tokens(), output=tmp_path / "latent"
    ).output
    shorter = rankfold.compress(
        opened("llama"),
        method=rankfold.make_method("shortgpt", sparsity=0.3),
        calibration=tokens(),
        output=tmp_path / "stock",
    ).output
    assert stock_parameters(latent) is None and stock_parameters(shorter) is None


def test_both_commands_say_what_is_left_and_the_options_keep_all(place, run):
    code, out, err = run(f"compress model -o small --sparsity 0.3 {TEXT}")
    assert code in (0, None), err
    (line,) = (line for line in out.splitlines() if line.startswith("export --format"))
    assert re.fullmatch(
        r"export --format stock pads it to [\d,]+ parameters: \d+% of the saving is left; compress with `--allocation "
        r"uniform --target stock` to keep all of it, at an expected divergence from the dense model of [\d.]+ nats a "
        r"token in place of [\d.]+",
        line,
    )
    exported = json.loads(run("export small -o stock --json")[1])
    assert f"{exported['parameters']['exported']:,} parameters: {exported['saving_kept']:.0%} of the saving" in line
    options = re.search("`(.*)`", line)[1]
    code, out, err = run(f"compress model -o fits --sparsity 0.3 {TEXT} {options}")
    assert code in (0, None) and "of the saving is left" not in out, err
    code, out, _ = run("export fits -o stock-fits")
    assert "100% of the saving kept" in out and "is left" not in out
    assert run("export small -o again")[1].splitlines()[-1] == line


@pytest.mark.parametrize(
    ("target", "command"),
    [("llama.cpp", "rankfold export made -o made.gguf --format gguf-deci"), ("vllm", "vllm serve made")],
)
def test_ranks_for_an_engine_end_in_what_it_reads(target, command, place, run):
    save_tiny(place / "wide", blocks=2)
    config = transformers.LlamaConfig.from_pretrained(place / "wide", hidden_size=64, intermediate_size=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "wide")
    shutil.rmtree(place / "made", ignore_errors=True)
    code, out, err = run(f"compress wide -o made --sparsity 0.2 --modules mlp --target {target} {TEXT}")
    assert code in (0, None) and command in " ".join(out.partition("next:")[2].split()), err
    assert "stock" not in out
    shutil.rmtree(place / "made")
    out = run(f"compress wide -o made --sparsity 0.2 --modules mlp --target {target} {TEXT} --json")[1]
    assert json.loads(out)["stock"]["parameters"] == stock_parameters(place / "made")  # which is one more way


@pytest.mark.parametrize(
    ("family", "engines"),
    [("LlamaForCausalLM", ["vllm", "llama.cpp"]), ("GPT2LMHeadModel", ["vllm"]), ("BertForMaskedLM", [])]
    + [("ViTForImageClassification", []), ("Gemma3ForConditionalGeneration", []), ("FalconForCausalLM", ["vllm"])]
    # vLLM's backend has no ALiBi, no windows of GPT-Neo's, no sinks, no cache for attention to count the positions of
    # Llama 4 by, and no blocks without attention
    + [(name, []) for name in ("BloomForCausalLM", "MptForCausalLM", "GPTNeoForCausalLM", "GptOssForCausalLM")]
    + [("Llama4ForCausalLM", []), ("Qwen3NextForCausalLM", []), ("BambaForCausalLM", []), ("NemotronHForCausalLM", [])],
)
def test_an_engine_is_named_for_what_it_runs(family, engines, tmp_path):
    getattr(transformers, family).config_class(architectures=[family]).save_pretrained(tmp_path)
    targets = ("transformers", "vllm", "llama.cpp", "stock")
    assert [t for t in targets if engine_of(tmp_path, {"plan": {"method": {"target": t}}})] == engines


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({}, None),
        ({"block": {"kind": "shortcut_block"}}, "slicegpt"),
        ({"attention": {"kind": "attention", "k": {"kind": "latent", "basis": "before"}}}, "basis-sharing"),
        ({"attention": {"kind": "attention", "alibi": True}}, "a mask or a bias of its own"),
        ({"attention": {"kind": "attention", "causal": False}}, "a mask or a bias of its own"),
        ({"attention": {"kind": "attention", "sinks": True}}, "attention sinks"),
    ],
)
def test_what_vllm_does_not_run_is_named_with_its_reason(modules, reason):
    found = why_refused(transformers.LlamaConfig(), modules)
    assert found is None if reason is None else reason in found


def test_falcon_with_alibi_is_not_for_vllm():
    """Its mask holds the bias, and vLLM's attention takes no mask."""
    assert "a mask or a bias" in (why_refused(transformers.FalconConfig(alibi=True), {}) or "")


def test_the_divergence_is_that_of_the_ranks_for_stock(place, run):
    """Of the costs that were measured, and of those ranks that the other command chooses."""
    for name, options in (("kept", ""), ("uniform", "--allocation uniform --target stock")):
        run(f"compress model -o {name} --sparsity 0.3 {TEXT} {options}")
    source = rankfold.open_model(place / "model", device="cpu")
    method = rankfold.Rankfold(sparsity=0.3, rank_multiple=2, modules=("mlp", "qk", "vo"))
    windows = rankfold.load_calibration("pydoc", source, num_samples=4, max_length=32)
    costs = method.allocation.measure(DenseMeasures(source, method, rank_options(source, method), tokens=windows))
    chosen = json.loads((place / "uniform" / "rankfold.json").read_text())["plan"]["modules"]
    expected = sum(costs[one["block"], one["module"]][one["rank"]] for one in chosen)
    facts = json.loads((place / "kept" / "rankfold.json").read_text())["plan"]["facts"]
    assert facts["divergence_for_stock"] == pytest.approx(expected, rel=1e-6)
    assert facts["divergence_for_stock"] > sum(facts["divergence"].values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "`--allocation uniform --target stock`"),
        ({"exclude_blocks": [0]}, "`--allocation uniform --target stock` and without --exclude-blocks"),
        ({"modules": ["mlp"]}, "`--allocation uniform --target stock`"),
        ({"modules": ["mlp", "qk"]}, None),
        ({"method": "latentllm"}, None),
    ],
)
def test_options_are_those_that_the_method_takes(options, expected):
    name = options.get("method", "rankfold")
    described = rankfold.make_method(name).describe() | options
    assert options_for_target({"plan": {"method": described}}, "stock") == expected
