"""A compressed checkpoint loads where rankfold is not installed, and is refused politely where it must be."""

import json
from subprocess import CompletedProcess

import pytest
import torch
import transformers as t

import rankfold
from families import GQA, HEADS_OF_STATES, some_ids, tiny_model
from rankfold.data.calibration_data import CalibrationData
from rankfold.modules.loading import RankfoldForCausalLM
from tiny_encoders import batch_of, opened_encoder, samples_of
from warm import python

LAYERS = ["linear_attention", "full_attention", "full_attention"]
WITHOUT = """
import sys, importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rankfold":
            raise ImportError("rankfold is not installed")
sys.meta_path.insert(0, Block())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
from transformers import AutoConfig, AutoModel
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(config) is type(model.config) and config.quantization_config["quant_method"].startswith("rankfold")
headless = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(model.get_output_embeddings()(headless(ids).last_hidden_state), model(ids).logits)
shapes = lambda m: {name: tensor.shape for name, tensor in m.state_dict().items()}
built = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
assert type(built) is type(model) and shapes(built) == shapes(model)
dense = AutoModelForCausalLM.from_pretrained(sys.argv[5])  # dense models of the type still load as ever
assert type(dense) is type(model) and not hasattr(dense.config, "quantization_config")
"""


@pytest.mark.parametrize(
    "family, method, options",
    [
        ("llama", "modegpt", {}),
        ("gpt2", "modegpt", {}),
        ("qwen3", "modegpt", {"modules": ("mlp", "qk", "vo")}),
        ("gptj", "modegpt", {}),
        ("mixtral", "modegpt", {}),
        ("opt", "latentllm", {}),
        ("opt", "latentllm", {"bits": 5, "sparse": 0.1}),
        ("opt", "latentllm", {"sparse": 1.0}),
        ("llama", "slicegpt", {}),
        ("falcon-gqa", "slicegpt", {}),
    ],
)
def test_without_rankfold(tmp_path, family, method, options):
    source = rankfold.open_model(tiny_model(family), device="cpu")
    source.autocast = None
    options = {"sparsity": 0.3, "rank_multiple": 2, **options}
    folder = tmp_path / "small"
    tokens = CalibrationData(some_ids(16, 32), "random", "random", 0)
    rankfold.compress(source, method=rankfold.make_method(method, **options), calibration=tokens, output=folder)
    ids = some_ids()
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [str(folder), str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt"), str(tmp_path / "again")]
    tiny_model(family).save_pretrained(tmp_path / "dense")
    arguments.append(str(tmp_path / "dense"))
    done = python(WITHOUT, *arguments)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = rankfold.load(folder, device="cpu")(ids).logits
        twice = rankfold.load(tmp_path / "again", device="cpu")(ids).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    assert torch.equal(twice, expected)
    written, again = (tmp_path / name / "modeling_rankfold.py" for name in ("small", "again"))
    assert again.read_bytes() == written.read_bytes()


@pytest.mark.parametrize(("method", "options"), [("modegpt", {}), ("latentllm", {"bits": 6})])
def test_a_model_that_sees_loads_as_its_language_model_where_the_dense_one_does(tmp_path, method, options):
    text = t.Qwen3_5TextConfig(**GQA, **HEADS_OF_STATES, head_dim=8, layer_types=LAYERS)
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    dense = t.Qwen3_5ForConditionalGeneration(t.Qwen3_5Config(text_config=text, vision_config=sizes))
    dense.save_pretrained(tmp_path / "dense")
    tokens, folder = CalibrationData(some_ids(16, 32), "random", "random", 0), tmp_path / "small"
    options |= {"method": method, "rank_multiple": 2, "calibration": tokens, "output": folder, "device": "cpu"}
    rankfold.compress(tmp_path / "dense", 0.2, **options)
    with torch.no_grad():
        expected = rankfold.load(folder, device="cpu")(input_ids=some_ids()).logits
        model = t.AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(tmp_path / "again")
        again = t.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        remote = RankfoldForCausalLM.from_pretrained(folder, config=t.AutoConfig.from_pretrained(folder))
        for one in (model, again, remote):
            assert type(one) is t.Qwen3_5ForCausalLM and torch.equal(one(input_ids=some_ids()).logits, expected)


def lines_without(arguments: str, *names: str) -> CompletedProcess:
    """Python lines where rankfold is not installed."""
    blocked = WITHOUT.partition("import torch")[0] + arguments
    return python(blocked, *names)


BOTH = """
import sys
order, small, stock = sys.argv[1:]
if order == "package first":
    import rankfold
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(small, trust_remote_code=True)
import rankfold
from rankfold.modules import CompressedAttention, RankfoldConfig
again = rankfold.load(small, device="cpu")
built = AutoModelForCausalLM.from_config(model.config)
for one in (again, built) if order == "code first" else (model, again, built):
    assert type(one.config.quantization_config) is RankfoldConfig
    assert any(isinstance(module, CompressedAttention) for module in one.modules())
shapes = lambda m: {name: tensor.shape for name, tensor in m.state_dict().items()}
assert shapes(built) == shapes(model)
assert rankfold.export(small, stock).difference < 1e-5
"""


@pytest.mark.parametrize("order", ["package first", "code first"])
def test_the_package_goes_before_the_code_beside_the_weights(tmp_path, order):
    """Whoever trusts the code, and then uses the package on the same folder, gets modules that the package knows."""
    done = python(BOTH, order, str(small_llama(tmp_path)), str(tmp_path / "stock"))
    assert done.returncode == 0, done.stderr


def test_lm_evals_own_way_of_loading_runs(tmp_path):
    """It reads the config with the code trusted, asks transformers about the method, and only then loads the model."""
    small = small_llama(tmp_path)
    loading = """
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoQuantizationConfig
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
AutoQuantizationConfig.from_dict(config.quantization_config)
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
    done = lines_without(loading, str(small))
    assert done.returncode == 0, done.stderr


def test_without_rankfold_and_without_trust_what_is_printed_says_what_helps(tmp_path):
    small = small_llama(tmp_path)
    loading = "import transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = lines_without(loading, str(small))
    assert done.returncode != 0
    assert "got rankfold (import rankfold first, or give trust_remote_code=True)" in done.stderr


def test_a_class_that_a_folder_is_not_for_is_named(tmp_path):
    source = opened_encoder("vit-head")
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    small = rankfold.compress(source, method=method, calibration=samples_of(source), output=tmp_path / "vit").output
    loading = "import transformers; transformers.{}.from_pretrained(sys.argv[1], trust_remote_code=True)"
    done = lines_without(loading.format("AutoModelForCausalLM"), str(small))
    message = "vit has no class for AutoModelForCausalLM; load the checkpoint by the Auto class of what it names: "
    assert done.stderr.splitlines()[-1] == f"ValueError: {message}ViTForImageClassification"
    done = lines_without(loading.format("AutoModelForQuestionAnswering"), str(small_llama(tmp_path)))
    assert "does not have, a LlamaForQuestionAnswering; load it as LlamaForCausalLM" in done.stderr.splitlines()[-1]


def small_llama(folder):
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    return rankfold.compress(
        source,
        method=method,
        calibration=CalibrationData(some_ids(8, 32), "r", "r", 0),
        output=folder / "small",
        mode="one-pass",
    ).output


def test_checkpoints_with_the_first_name_of_the_method_still_load(tmp_path):
    small = small_llama(tmp_path)
    with torch.no_grad():
        expected = rankfold.load(small, device="cpu")(some_ids()).logits
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "rankfold"
    (small / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(rankfold.load(small, device="cpu")(some_ids()).logits, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "os.system"}, "unknown module kind 'os.system'"),
        ({"out": -3}, "'out' of a linear module must be an integer that is not negative, got -3"),
        ({"out": "6"}, "must be an integer that is not negative"),
    ],
)
def test_a_hostile_description_is_refused(tmp_path, change, message):
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    folder = tmp_path / "small"
    method = rankfold.MoDeGPT(modules={"mlp": 0.3}, rank_multiple=2)
    rankfold.compress(source, method=method, calibration=CalibrationData(some_ids(8, 32), "r", "r", 0), output=folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules"]["model.layers.0.mlp.up_proj"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(rankfold.RankfoldError, match=message):
        rankfold.load(folder, device="cpu")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"up": "mlp.side_proj"}, "side_proj"),
        ({"behind": 0}, "'behind' of a shortcut_block module must be a positive integer, got 0"),
        ({"before": 8}, "not the one that was written"),
        ({"eps": [0.5, 0.5]}, "not the one that was written"),
    ],
)
def test_a_hostile_description_of_a_block_is_refused(tmp_path, change, message):
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    folder = tmp_path / "small"
    method = rankfold.make_method("slicegpt", sparsity=0.2, rank_multiple=2)
    rankfold.compress(source, method=method, calibration=CalibrationData(some_ids(8, 32), "r", "r", 0), output=folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules"]["model.layers.1"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(rankfold.RankfoldError, match=message):
        rankfold.load(folder, device="cpu")


def test_an_unknown_path_or_newer_format_is_refused(tmp_path):
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    folder = tmp_path / "small"
    method = rankfold.MoDeGPT(modules={"mlp": 0.3}, rank_multiple=2)
    rankfold.compress(source, method=method, calibration=CalibrationData(some_ids(8, 32), "r", "r", 0), output=folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("model.layers.0.mlp.up_proj", "model.layers.0.mlp.side_proj"))
    with pytest.raises(rankfold.RankfoldError, match="'model.layers.0.mlp.side_proj' that this model does not have"):
        rankfold.load(folder, device="cpu")
    (folder / "config.json").write_text(text.replace('"format": 2', '"format": 99'))
    with pytest.raises(rankfold.RankfoldError, match="format 99, this version reads 1 and 2"):
        rankfold.load(folder, device="cpu")


def test_encoders_load_by_their_auto_class(tmp_path):
    """Of two families, one with its output projection outside the attention module and one that is called by place."""
    names = []
    for family in ("bert-head", "vit-head"):
        source = opened_encoder(family)
        method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
        rankfold.compress(source, method=method, calibration=samples_of(source), output=tmp_path / family)
        torch.save(batch_of(source), tmp_path / f"{family}.pt")
        names.append(str(tmp_path / family))
    loading = """
import torch, transformers
for folder, auto in zip(sys.argv[1:], ("AutoModelForMaskedLM", "AutoModelForImageClassification")):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load(folder + ".pt")).logits, folder + ".logits")
"""
    done = lines_without(loading, *names)
    assert done.returncode == 0, done.stderr
    for name in names:
        with torch.no_grad():
            expected = rankfold.load(name, device="cpu")(torch.load(f"{name}.pt")).logits
        assert torch.equal(torch.load(f"{name}.logits"), expected)
