"""What must hold for 2:4 methods on every family; references are raw activations of transformers' linear layers."""

import json

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import rankfold
from activations import ATTENTION, OUTPUT, blocks_of, member, weight_of
from families import CONFIGS, EXPERTS, KINDS, cached_numbers, opened, some_ids, tiny_model, tokens
from gradients import stock_gradients
from interrupted import assert_ends_in_the_same_bytes
from rankfold import make_method
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.linalg.semi_structured import surgeon

REPEATS = {"falcon-gqa", "falcon-gqa-one-norm"}  # what transformers caches is repeated for every query head there
NAMES = ("wanda", "sparsegpt", "pruner-zero")


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, name, tmp_path_factory):
    """DenseModel, plan, folder, the model read back from it."""
    source, method, plans = opened(family), method_for(family, name), []
    folder = tmp_path_factory.mktemp(name) / "masked"
    rankfold.compress(source, method=method, calibration=tokens(), output=folder, mode="one-pass", on_plan=plans.append)
    return source, plans[0], folder, rankfold.load(folder, device="cpu")


def method_for(family: str, name: str):
    return make_method(name, **({"modules": {"qkv": 0.5, "o": 0.5}} if family in EXPERTS else {}))


@torch.no_grad()
def logits(model) -> Tensor:
    return model(some_ids()).logits


def linears(model, family: str) -> dict[tuple[int, str], nn.Module]:
    """Block and path -> every linear layer of the blocks; beside experts those of attention."""
    found = {}
    for index, block in enumerate(blocks_of(model)):
        owner = member(block, ATTENTION) if family in EXPERTS else block
        found |= {(index, path): m for path, m in owner.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    return found


@torch.no_grad()
def inputs(model, family: str, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """What enters each of them, in fp64."""
    seen, hooks = {}, []
    for key, layer in linears(model, family).items():
        hook = lambda _, args, key=key: seen.update({key: args[0].flatten(0, -2).double()})  # noqa: E731
        hooks.append(layer.register_forward_pre_hook(hook))
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def gradients(family: str, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """Root of the squared gradients of every weight, summed over the windows, by autograd through the stock model."""
    model, total = tiny_model(family), {}
    for window in ids.split(1):
        model.zero_grad()
        stock_gradients(model, window, {})
        for key, layer in linears(model, family).items():
            gradient = layer.weight.grad if isinstance(layer, nn.Linear) else layer.weight.grad.T
            total[key] = total.get(key, 0.0) + gradient.double().square()
    return {key: squares.sqrt() for key, squares in total.items()}


def zeroed(W: Tensor, scores: Tensor) -> Tensor:
    """Without the two smallest scores of every four; of equal ones, as where a unit is never active, the last go."""
    result = W.clone()
    for row, out in zip(scores, result, strict=True):
        for start in range(0, len(row), 4):
            out[sorted(range(start, start + 4), key=lambda j: (row[j], -j))[:2]] = 0
    return result


def expected(name: str, W: Tensor, X: Tensor, G: Tensor | None = None) -> Tensor:
    if name == "sparsegpt":
        return surgeon(W, X.T @ X / len(X)).float()
    if name == "wanda":
        return zeroed(W, W.double().abs() * X.norm(dim=0))
    return zeroed(W, W.double() ** 2 * (G - G.min()) / (G.max() - G.min()))


def test_every_layer_is_what_the_definition_says(run, family, name):
    dense, masked = tiny_model(family), linears(run[3], family)
    seen = inputs(dense, family, tokens().ids)
    slopes = gradients(family, tokens().ids) if name == "pruner-zero" else {}
    for key, layer in linears(dense, family).items():
        found, wanted = weight_of(masked[key]), expected(name, weight_of(layer), seen[key], slopes.get(key))
        assert torch.equal(found == 0, wanted == 0), key
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 if name == "sparsegpt" else 0.0)


def test_two_of_four_inputs_are_zero_for_every_output(run, family):
    for key, layer in linears(run[3], family).items():
        assert (weight_of(layer).unflatten(1, (-1, 4)) == 0).sum(-1).eq(2).all(), key


def test_nothing_else_changes(run, family):
    masked, dense = run[3].state_dict(), tiny_model(family).state_dict()
    assert masked.keys() == dense.keys()
    touched = {name for name in dense if not torch.equal(masked[name], dense[name])}
    assert len(touched) == len(linears(run[3], family)) and all(name.endswith(".weight") for name in touched)


@pytest.mark.kinds
def test_the_result_is_a_stock_model_that_saves_and_loads(run, family, name, tmp_path):
    source, _, folder, _ = run
    method = method_for(family, name)
    model = rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model
    config = json.loads((folder / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "auto_map"} and not list(folder.glob("*.py"))
    stock = t.AutoModelForCausalLM.from_pretrained(folder)
    assert type(stock) is type(source.model) and torch.equal(logits(stock), logits(model))
    rankfold.save(model, tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))


def test_the_plan_says_that_zeros_stay(run, family):
    source, plan, folder, model = run
    layers = linears(model, family).values()
    zeros = sum(int((weight_of(layer) == 0).sum()) for layer in layers)
    assert plan.removed_weights == plan.facts["zeros"] == zeros == sum(layer.weight.numel() for layer in layers) // 2
    assert family in EXPERTS or plan.sparsity == 0.5
    assert plan.parameters_after == plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.bytes_after == plan.bytes
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    repeated = (
        source.meta_block(0).attention.heads // source.meta_block(0).attention.kv_heads if family in REPEATS else 1
    )
    assert cached_numbers(model) * 4 == repeated * plan.kv_bytes_per_token_after == repeated * plan.kv_bytes_per_token
    record, card = json.loads((folder / "rankfold.json").read_text()), (folder / "README.md").read_text()
    assert sum(r["zeros"] for block in record["blocks"].values() for r in block.values()) == zeros
    assert "set to zero, which stay in the file" in card and "import rankfold" not in card


def test_errors_are_of_the_output(run, family, name):
    record, dense, text = json.loads((run[2] / "rankfold.json").read_text()), tiny_model(family), tokens()
    masked, seen = linears(run[3], family), linears(dense, family)
    outputs = (*(f"{a}.{o}" for a in ATTENTION for o in OUTPUT), *(OUTPUT if family in EXPERTS else ()))
    key = next((1, path) for path in outputs if (1, path) in seen)
    report = record["blocks"]["1"]["o"]
    W, V = (weight_of(layers[key]).double() for layers in (seen, masked))
    for ids, what in ((text.ids, "relative_error"), (text.held_out, "held_out_error")):
        X = inputs(dense, family, ids)[key]
        assert report[what] == pytest.approx(((X @ (W - V).T).norm() / (X @ W.T).norm()).item(), rel=1e-3)


def test_sparsity_zero_leaves_the_logits_unchanged(family):
    source = opened(family)
    shares = {"modules": {"qkv": 0.0}} if family in EXPERTS else {"sparsity": 0.0}
    assert torch.equal(
        logits(rankfold.compress(source, method=make_method("wanda", **shares), calibration=tokens()).model),
        logits(source.model),
    )


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])  # the other one looks at gradients of the dense model alone
def test_sequential_measures_what_masked_blocks_send(name):
    """Block 1 is fitted to what block 0 sends once it is masked, block 0 to the same in both modes."""
    models = [
        rankfold.compress(opened("llama"), method=make_method(name), calibration=tokens(), mode=m).model
        for m in ("sequential", "one-pass")
    ]
    layers = linears(models[0], "llama")
    seen = inputs(models[0], "llama", tokens().ids)
    dense = linears(tiny_model("llama"), "llama")
    for path in ("self_attn.q_proj", "self_attn.v_proj"):
        wanted = expected(name, weight_of(dense[1, path]), seen[1, path])
        torch.testing.assert_close(weight_of(layers[1, path]), wanted, rtol=1e-3, atol=1e-4)
    other = linears(models[1], "llama")
    same = {key for key in layers if torch.allclose(layers[key].weight, other[key].weight, atol=1e-4)}
    assert {index for index, _ in same} == {0}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_interrupted_runs_end_in_the_same_bytes(family, name, tmp_path, monkeypatch):
    assert_ends_in_the_same_bytes(
        lambda folder: (
            rankfold.compress(opened(family), method=make_method(name), calibration=tokens(), output=folder).output
        ),
        tmp_path,
        monkeypatch,
    )


def test_single_modules_have_their_own_sparsity():
    source = opened("llama")
    model = rankfold.compress(
        source, method=make_method("wanda", modules={"down": 0.5, "o": 0.0}), calibration=tokens()
    ).model
    for (_, path), layer in linears(model, "llama").items():
        assert bool((layer.weight == 0).any()) == path.endswith("down_proj")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "bytes"}, "method wanda takes budget parameters, got bytes"),
        ({"allocation": "influence"}, "method wanda takes allocation uniform, got influence"),
        ({"modules": {"mlp": 0.5}}, "unknown module 'mlp'; .*available: qkv, o, up, down"),
    ],
)
def test_what_it_does_not_take_is_said(options, message):
    with pytest.raises(OptionError, match=message):
        make_method("wanda", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 0.3}, "method wanda keeps 2 of 4 weights, so its sparsity is 0.5, got 0.3; take 0.5"),
        ({"modules": {"o": 0.25}}, "its sparsity is 0.5, got 0.25"),
        ({"modules": ("down",)}, "such as modules={'down': 0.5}"),
        ({"exclude_blocks": (0,)}, "takes a half of all linear weights of the blocks; leave out exclude_blocks"),
        ({"scope": "model"}, "leave out exclude_blocks and scope=model"),
    ],
)
def test_another_pattern_is_refused_before_anything_is_measured(options, message, monkeypatch):
    monkeypatch.setattr(rankfold.pipeline, "measure", None)
    for work in (rankfold.plan, rankfold.compress):
        with pytest.raises(OptionError, match=message):
            work(opened("llama"), method=make_method("wanda", **options), calibration=tokens())


def test_the_ridge_is_positive_and_counts():
    with pytest.raises(OptionError, match="ridge must be > 0, got 0.0; the default is 0.01"):
        make_method("sparsegpt", ridge=0.0)
    a, b = (
        rankfold.compress(opened("opt"), method=make_method("sparsegpt", ridge=r), calibration=tokens()).model
        for r in (0.01, 10.0)
    )
    assert not torch.equal(logits(a), logits(b))


def test_experts_stay():
    with pytest.raises(
        UnsupportedModelError,
        match="block 0 of mixtral has no linear layers that are module 'up'; the stacked weights of experts are not "
        "taken; use modules=.'qkv': 0.5, 'o': 0.5}",
    ):
        rankfold.compress(opened("mixtral"), method=make_method("wanda"), calibration=tokens())


def test_experts_beside_a_shared_one_are_the_reason_and_their_attention_can_be_asked_for():
    message = "block 0 of qwen2_moe has experts; the stacked weights of experts are not taken; use modules=.'qkv'"
    with pytest.raises(UnsupportedModelError, match=message):
        rankfold.compress(opened("qwen2_moe"), method=make_method("wanda"), calibration=tokens())
    method = make_method("wanda", modules={"qkv": 0.5, "up": 0.5})
    assert rankfold.compress(opened("qwen2_moe"), method=method, calibration=tokens()).plan.modules


def test_widths_must_be_multiples_of_four():
    config = CONFIGS["llama"]()
    config.intermediate_size = 46
    source = rankfold.open_model(t.LlamaForCausalLM(config), device="cpu")
    with pytest.raises(UnsupportedModelError, match="llama has 46 inputs in module 'down', no multiple of 4"):
        rankfold.compress(source, method=make_method("wanda"), calibration=tokens())


def test_gradients_take_text():
    source = opened("llama")
    moments = rankfold.calibrate(source, tokens())
    with pytest.raises(OptionError, match=r"gradients are measured on text, .* reads no gradients"):
        rankfold.compress(source, method=make_method("pruner-zero"), moments=moments)
