"""Models that a caller holds: what cannot be compressed is one line, and what can comes back as it was."""

from types import SimpleNamespace

import pytest
import torch
import transformers as t
from torch import nn

import rankfold
from families import GQA, KINDS, some_ids, tiny_model, tokens
from rankfold import CalibrationData, MoDeGPT
from rankfold.errors import DataError, OptionError, RankfoldError, UnsupportedModelError
from rankfold.models.weights import check_finite

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)


class Doubled(nn.Linear):
    """Computes something else than its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


def compressed():
    return rankfold.compress(
        rankfold.open_model(tiny_model("llama"), device="cpu"), method=METHOD, calibration=tokens()
    ).model


def on_meta():
    with torch.device("meta"):
        return t.LlamaForCausalLM(t.LlamaConfig(**GQA))


def adapted():
    model = tiny_model("llama")
    model.peft_config = {
        "default": SimpleNamespace()
    }  # what a wrapped model of peft has, and one with transformers' own adapters
    return model


def wrapped_by_peft():
    model = adapted()
    model.merge_and_unload = None
    return model


def renamed(old: str, new: str):
    """A model whose module ``old`` has gone into another one, as wrappers and adapters do it."""
    model = tiny_model("llama")
    path, _, name = old.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, name, nn.ModuleDict({new: getattr(owner, name)}))
    return model


def with_weight(change):
    model = tiny_model("llama")
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.requires_grad_(False)
    weight.data = change(weight.data)
    return model


class Packed(torch.Tensor):
    """As torchao's tensors: it shows floats, and knows few operations."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        return args[0]


def packed(model=None):
    """As `quantize_` of torchao leaves a model: nothing in the config says so."""
    model = model or tiny_model("llama")
    weight = torch.Tensor._make_wrapper_subclass(Packed, (48, 32))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight)
    return model


def quantised():
    model = tiny_model("llama")
    model.config.quantization_config = SimpleNamespace(quant_method="gptq")
    return model


def doubled():
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    return model


def parametrised():
    model = tiny_model("llama")
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def sentence_transformer():
    """As sentence-transformers holds a model: in the first of the modules that make a vector of a text."""
    return nn.Sequential(nn.ModuleDict({"model": tiny_model("llama")}), nn.Identity())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (compressed, r"LlamaForCausalLM is already compressed or quantised \(rankfold\); start from the dense model"),
        (quantised, r"already compressed or quantised \(gptq\)"),
        (on_meta, r"on the meta device, without numbers; load the weights first"),
        (wrapped_by_peft, r"carries adapters; merge them first \(model = model.merge_and_unload\(\)\)"),
        (adapted, r"carries adapters; merge them first \(model = PeftModel.from_pretrained\(base, adapter\)\.merge"),
        (
            lambda: renamed("model.layers.1.mlp.up_proj", "base_layer"),
            r"is wrapped by peft, its adapter not merged \(model.layers.1.mlp.up_proj.base_layer.weight\); merge it",
        ),
        (
            lambda: renamed("model.layers.1.mlp", "_orig_mod"),
            r"was compiled by torch.compile \(model.layers.1.mlp._orig",
        ),
        (lambda: nn.DataParallel(tiny_model("llama")), r"give the model in it \(model.get_submodule\('module'\)\)"),
        (sentence_transformer, r"; give the model in it \(model.get_submodule\('0.model'\)\)"),
        (
            lambda: with_weight(lambda w: w.to(torch.float8_e4m3fn)),
            r"quantised \(F8: model.layers.1.mlp.up_proj.weight\)",
        ),
        (packed, r"the model is quantised \(Packed: model.layers.1.mlp.up_proj.weight\); give the model as it was"),
        (
            lambda: with_weight(lambda w: w[:0, 0]),
            r"1 tensor without entries \(model.layers.1.mlp.up_proj.weight\), as",
        ),
        (
            lambda: torch.compile(tiny_model("llama")),
            r"is compiled; give the model that was compiled \(model._orig_mod\)",
        ),
        (
            lambda: tiny_model("llama").model,
            r"LlamaModel has no language-model head; load it with AutoModelForCausalLM",
        ),
        (
            lambda: t.Qwen2ForSequenceClassification(t.Qwen2Config(**GQA, pad_token_id=0)),
            r"Qwen2ForSequenceClassification has no language-model head, and only enc.* saved as Qwen2ForCausalLM",
        ),
        (lambda: nn.Linear(2, 2), r"Linear is not a transformers model; give a PreTrainedModel"),
        (doubled, r"model.layers.1.mlp.up_proj is a Doubled, which may compute something else"),
        (parametrised, r"model.layers.0.mlp.up_proj is a ParametrizedLinear"),
    ],
)
def test_what_is_no_plain_dense_model_is_refused(make, message):
    with pytest.raises(UnsupportedModelError, match=message):
        rankfold.open_model(make(), device="cpu")


def test_a_quantised_compressed_model_is_neither_saved_nor_trained(tmp_path):
    model = packed(compressed())
    for use in (
        lambda: rankfold.save(model, tmp_path / "saved"),
        lambda: rankfold.export(model, tmp_path / "stock"),
        lambda: rankfold.recover(model, tiny_model("llama"), calibration=tokens()),
    ):
        with pytest.raises(UnsupportedModelError, match=r"quantised \(Packed: model.layers.1.mlp.up_proj.weight\)"):
            use()
    assert not list(tmp_path.iterdir())


def test_weights_of_a_quantisers_own_class_are_not_looked_at_where_a_checkpoint_is_loaded():
    """torchao's have no range to ask for, and transformers loads them."""
    check_finite(packed().state_dict())


def test_a_model_on_several_devices_is_refused(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    blocks = {f"model.layers.{i}": "disk" if i == 2 else "cpu" for i in range(3)}
    around = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    spread = t.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=blocks | around, offload_folder=tmp_path / "offload"
    )
    with pytest.raises(UnsupportedModelError, match="spread over cpu, disk; give its folder or hub id, which is read"):
        rankfold.open_model(spread, device="cpu")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="lm_head.weight and 0 more tensors are on the meta device"):
        rankfold.open_model(model, device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
@pytest.mark.parametrize("thing", [{"a": torch.ones(1)}, None, 3, t.LlamaConfig(**GQA)], ids=lambda x: type(x).__name__)
def test_what_is_no_name_of_a_model_is_refused(use, thing):
    with pytest.raises(OptionError, match=f"model must be a str.* of type {type(thing).__name__}"):
        use(thing)


@pytest.mark.parametrize("family", KINDS)
def test_layers_of_every_family_are_known(family):
    rankfold.open_model(tiny_model(family), device="cpu")


def test_the_callers_model_keeps_its_modes_and_calibrates_without_dropout():
    plain = t.LlamaForCausalLM(t.LlamaConfig(**GQA, attention_dropout=0.9)).train()
    plain.model.layers[1].mlp.eval()
    modes = [module.training for module in plain.modules()]
    results = []
    for _ in range(2):
        source = rankfold.open_model(plain, device="cpu")
        results.append(rankfold.compress(source, method=METHOD, calibration=tokens()).model.state_dict())
        rankfold.calibrate(source, tokens())
        assert [module.training for module in plain.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values(), strict=True))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, 8, dtype=torch.long), r"at least one sample of at least 2 tokens, got \[0, 8\]"),
        (torch.zeros(4, 1, dtype=torch.long), r"at least one sample of at least 2 tokens, got \[4, 1\]"),
        (torch.zeros(4, 8), r"int64 token ids, .*got \[4, 8\] of torch.float32"),
        (torch.zeros(8, dtype=torch.long), r"got \[8\] of torch.int64"),
        ([[1, 2]], "got list"),
        (torch.full((2, 8), -100), "negative token id -100; padding is no text"),
    ],
)
@pytest.mark.parametrize("where", ["ids", "held_out"])
def test_ids_that_are_no_windows_of_tokens_are_refused(ids, message, where):
    given = {"ids": some_ids(), "held_out": some_ids()} | {where: ids}
    with pytest.raises(DataError, match=f"{where} .*{message}"):
        CalibrationData(name="n", origin="o", seed=0, **given)


def test_windows_longer_than_the_context_are_refused():
    source = rankfold.open_model(tiny_model("opt"), device="cpu")
    for calibration in (
        CalibrationData(some_ids(2, 65), "n", "o", 0),
        CalibrationData(some_ids(), "n", "o", 0, some_ids(2, 65)),
    ):
        with pytest.raises(DataError, match="samples of 65 tokens are longer than the model's context of 64"):
            rankfold.compress(source, method=METHOD, calibration=calibration)


@pytest.mark.parametrize("part", ["mlp.up_proj", "mlp.down_proj", "mlp", "self_attn.v_proj", "self_attn", ""])
@pytest.mark.parametrize("method", ["modegpt", "latentllm"])
def test_a_part_that_is_zero_is_compressed_without_error(part, method):
    model = tiny_model("llama")
    for parameter in model.model.layers[1].get_submodule(part).parameters():
        parameter.data.zero_()
    source = rankfold.open_model(model, device="cpu")
    small = rankfold.compress(
        source, method=rankfold.make_method(method, sparsity=0.3, rank_multiple=2), calibration=tokens()
    ).model
    assert torch.isfinite(small(some_ids()).logits).all()


def test_too_few_tokens_are_said(caplog):
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    rankfold.compress(source, method=METHOD, calibration=CalibrationData(some_ids(1, 2), "n", "o", 0))
    assert "2 calibration tokens are too few: the widest moment has 48 dimensions" in caplog.text
    caplog.clear()
    rankfold.compress(source, method=METHOD, calibration=CalibrationData(some_ids(6, 8), "n", "o", 0))
    assert "too few" not in caplog.text


def test_every_weight_and_the_config_are_in_the_fingerprint():
    plain = tiny_model("llama")
    prints = {rankfold.open_model(plain, device="cpu").fingerprint}
    assert prints == {rankfold.open_model(tiny_model("llama"), device="cpu").fingerprint}
    for _name, parameter in plain.named_parameters():
        before = parameter.data.clone()
        parameter.data.flatten()[-1] += 1e-3
        prints.add(rankfold.open_model(plain, device="cpu").fingerprint)
        parameter.data.copy_(before)
    plain.config.rms_norm_eps *= 2
    prints.add(rankfold.open_model(plain, device="cpu").fingerprint)
    assert len(prints) == 2 + len(list(plain.parameters()))


def test_the_fingerprint_is_of_the_weights_as_they_are_not_as_they_will_be_stored(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "m")
    prints = {
        rankfold.open_model(tmp_path / "m", device="cpu", dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")
    }
    assert prints == {rankfold.open_model(rankfold.load(tmp_path / "m", device="cpu"), device="cpu").fingerprint}


def test_another_version_of_transformers_opens_the_same_model(tmp_path, monkeypatch):
    """Or moments, unfinished runs and records would be of another model after each upgrade."""
    tiny_model("llama").save_pretrained(tmp_path / "m")
    before = rankfold.open_model(tmp_path / "m", device="cpu").fingerprint
    monkeypatch.setattr(t.configuration_utils, "__version__", "5.99.0")
    source = rankfold.open_model(tmp_path / "m", device="cpu")
    assert source.config.to_diff_dict()["transformers_version"] == "5.99.0"
    assert source.fingerprint == before


def test_moments_of_a_model_that_differs_in_the_middle_are_refused():
    model = tiny_model("llama")
    moments = rankfold.calibrate(rankfold.open_model(model, device="cpu"), tokens())
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    with pytest.raises(RankfoldError, match="measured on another model"):
        rankfold.compress(rankfold.open_model(model, device="cpu"), method=METHOD, moments=moments)
