"""What must hold for Bolaco on every family; the reference is PCA of every layer's raw outputs, window by window."""

import json

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import rankfold
from activations import weight_of
from families import EXPERTS, KINDS, cached_numbers, opened, some_ids, tiny_model, tokens
from interrupted import assert_ends_in_the_same_bytes
from rankfold import make_method
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.modules import LatentLinear
from saved import assert_reloads

NOT_ALONE = ("query_key_value", "qkv_proj", "c_attn")  # several projections as one layer
GPTJ_ROPE = {"cohere", "cohere2", "glm"}  # their queries and keys are stored in another order of dimensions


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """DenseModel, plan, folder, the model read back from it."""
    source, plans = opened(family), []
    folder = tmp_path_factory.mktemp("bolaco") / "small"
    rankfold.compress(
        source, method=method_for(family), calibration=tokens(32), output=folder, mode="one-pass", on_plan=plans.append
    )
    return source, plans[0], folder, rankfold.load(folder, device="cpu")


def method_for(family: str, **options):
    return make_method(
        "bolaco", **{"sparsity": 0.1 if family in EXPERTS else 0.3, "rank_multiple": 2, "ridge": 1e-12} | options
    )


@torch.no_grad()
def logits(model) -> Tensor:
    return model(some_ids()).logits


def linears(model) -> dict[str, nn.Module]:
    """Path -> dense or latent linear layer, of attention and MLP."""
    kinds = nn.Linear | Conv1D | LatentLinear
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and "expert" not in name}


@torch.no_grad()
def outputs(model, ids: Tensor) -> dict[str, Tensor]:
    """Path -> what every layer sends without its bias, ``(windows, positions, out)``."""
    seen, hooks = {}, []
    for name, layer in linears(model).items():

        def see(m, args, out, name=name):
            y = out.double() if m.bias is None else out.double() - m.bias.double()
            seen[name] = y.view(*ids.shape, -1)

        hooks.append(layer.register_forward_hook(see))
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def components(Y: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Projection on the leading eigenvectors of the pooled covariance, and the mean."""
    pooled = torch.stack([torch.cov(window.T) for window in Y]).mean(0)
    U = torch.linalg.eigh(pooled).eigenvectors.flip(1)[:, :rank]
    return U @ U.T, Y.flatten(0, 1).mean(0)


@torch.no_grad()
def product(layer: LatentLinear) -> Tensor:
    """``(out, in)``: what it makes of the identity."""
    return (layer(torch.eye(layer.in_features)) - layer.bias).double().T


def test_layers_project_what_they_send_on_its_components(run, family):
    dense, small = tiny_model(family), linears(run[3])
    sent, compared = outputs(dense, tokens(32).ids), set()
    for name, layer in linears(dense).items():
        latent, last = small.get(name), name.rpartition(".")[2]
        if (
            not isinstance(latent, LatentLinear)
            or last in NOT_ALONE
            or (family in GPTJ_ROPE and last in ("q_proj", "k_proj"))
        ):
            continue
        P, mean = components(sent[name], latent.rank)
        torch.testing.assert_close(product(latent), P @ weight_of(layer).double(), rtol=2e-3, atol=2e-3)
        bias = 0 if layer.bias is None else layer.bias.double()
        torch.testing.assert_close(latent.bias.double(), bias + mean - P @ mean, rtol=2e-3, atol=2e-3)
        compared.add(last)
    assert compared


def test_planned_equals_actual(run, family):
    _, plan, folder, model = run
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert cached_numbers(model) * 4 == plan.kv_bytes_per_token_after
    assert plan.sparsity >= method_for(family).sparsity


def test_values_stay_dense_unless_they_are_named(run, family):
    assert {m.module for m in run[1].modules}.isdisjoint({"v"})
    source = opened(family)
    assert "v" in {m.module for m in rankfold.plan(source, method=method_for(family, modules={"v": 0.3})).modules}


@pytest.mark.kinds
def test_folder_and_memory_and_saving_twice_give_the_same_model(run, family, tmp_path):
    source, _, folder, _ = run
    model = rankfold.compress(source, method=method_for(family), calibration=tokens(32), mode="one-pass").model
    assert_reloads(folder, model, tmp_path / "twice")


def test_generation_with_cache_equals_without(run):
    ids, options = some_ids(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (
        run[3].generate(ids, attention_mask=torch.ones_like(ids), use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_all_layers_that_lose_rank_get_a_bias_and_the_plan_counts_it():
    source = opened("llama")
    model, plain = (
        rankfold.compress(source, method=method_for("llama", bias_refit=b), calibration=tokens()).model
        for b in (True, False)
    )
    layers = [m for m in model.modules() if isinstance(m, LatentLinear)]
    assert layers and all(m.bias is not None for m in layers)
    numbers = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert numbers[0] - numbers[1] == sum(m.bias.numel() for m in layers)
    assert numbers[1] == rankfold.plan(source, method=method_for("llama", bias_refit=False)).parameters_after


def test_windows_matter():
    """Errors are in the covariance of all tokens, whose optimum SVD-LLM takes; here means of windows differ."""
    source = opened("opt")
    errors = {}
    for name in ("bolaco", "svd-llm"):
        method = make_method(name, modules={"o": 0.4, "down": 0.4}, rank_multiple=2, ridge=1e-12)
        moments = rankfold.calibrate(source, tokens(32))
        errors[name] = [m.relative_error for m in rankfold.plan(source, method=method, moments=moments).modules]
    assert all(a > b for a, b in zip(errors["bolaco"], errors["svd-llm"], strict=True))


@pytest.mark.parametrize("budget", ["bytes", "flops"])
def test_other_budgets_hold(budget, tmp_path):
    source, plans = opened("llama"), []
    method = method_for("llama", budget=budget)
    folder = rankfold.compress(
        source, method=method, calibration=tokens(), output=tmp_path / "small", on_plan=plans.append
    ).output
    found, index = plans[0].budget, json.loads((folder / "model.safetensors.index.json").read_text())
    assert found["removed"] >= found["asked"] >= 0.3 * found["counted"] * (1 - 1e-9)
    if budget == "bytes":
        assert (
            found["removed"] == 4 * sum(p.numel() for p in source.model.parameters()) - index["metadata"]["total_size"]
        )


def test_interrupted_runs_end_in_the_same_bytes(tmp_path, monkeypatch):
    assert_ends_in_the_same_bytes(
        lambda folder: (
            rankfold.compress(opened("llama"), method=method_for("llama"), calibration=tokens(), output=folder).output
        ),
        tmp_path,
        monkeypatch,
    )


def test_from_saved_moments_the_same_comes_out(tmp_path):
    source, method = opened("opt"), method_for("opt")
    rankfold.calibrate(source, tokens(), tmp_path / "moments")
    a = rankfold.compress(source, method=method, moments=rankfold.MomentStore.open(tmp_path / "moments")).model
    assert torch.equal(
        logits(a), logits(rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model)
    )


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(UnsupportedModelError, match="opt has no module 'gate' that can be compressed"):
        rankfold.plan(opened("opt"), method=make_method("bolaco", sparsity=0.3, modules=("gate",)))


@pytest.mark.parametrize("options", [{"sparse": 0.2}, {"joint": "qk"}])
def test_forms_of_other_fits_are_refused(options):
    with pytest.raises(
        OptionError, match="method bolaco fits the components of each layer's own output; leave out sparse"
    ):
        make_method("bolaco", **options)
