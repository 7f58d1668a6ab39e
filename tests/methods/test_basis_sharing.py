"""Basis Sharing against numpy's SVD of raw weights and activations: no moments, no metric, no code of rankfold.

Shape legend: n tokens, N inputs and O outputs of a layer, k blocks of a group, R rank.
"""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import rankfold
from activations import blocks_of, weight_of
from families import opened, some_ids, tiny_model, tokens
from interrupted import assert_ends_in_the_same_bytes
from rankfold import make_method
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.modules import LatentLinear
from rankfold.recovery.tuning import prepared
from saved import assert_reloads

SHARED = {"llama": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "opt": ("q_proj", "k_proj", "v_proj", "fc1")}
ALONE = {"llama": ("o_proj", "down_proj"), "opt": ("out_proj", "fc2")}
NAMES = {"out_proj": "o_proj"}  # of what has become latent


def method(**options):
    return make_method("basis-sharing", **{"sparsity": 0.4, "rank_multiple": 2, "ridge": 1e-7} | options)


@pytest.fixture(scope="module", params=sorted(SHARED))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """Return a result of three blocks: two that share, and a last one that has nobody to share with."""
    folder = tmp_path_factory.mktemp("shared") / "small"
    return rankfold.compress(opened(family), method=method(), calibration=tokens(48), mode="one-pass", output=folder)


def layer(model: nn.Module, block: int, name: str) -> nn.Module:
    found = dict(blocks_of(model)[block].named_modules())
    return next(m for path, m in found.items() if path.rpartition(".")[2] in (name, NAMES.get(name)))


@torch.no_grad()
def inputs(model: nn.Module, block: int, name: str) -> np.ndarray:
    """Return what enters a layer of the dense model, ``(n, N)``."""
    seen: list[Tensor] = []
    hook = layer(model, block, name).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    model(tokens(48).ids, use_cache=False)
    hook.remove()
    return seen[0].double().numpy()


@torch.no_grad()
def weight(module: nn.Module) -> np.ndarray:
    if isinstance(module, LatentLinear):
        return (module.B.weight.double() @ module.A.weight.double()).numpy()
    return weight_of(module).double().numpy()


def root(model: nn.Module, group: range, name: str, *, centred: bool) -> np.ndarray:
    """Return ``S`` (N, N) symmetric, ``S S`` the mean second moment of a group's inputs, about each block's mean."""
    found = []
    for block in group:
        X = inputs(model, block, name)
        X = X - X.mean(0) if centred else X
        found.append(X.T @ X / len(X))
    values, vectors = np.linalg.eigh(sum(found))
    return vectors * np.sqrt(values.clip(0)) @ vectors.T


def best(Ws: list[np.ndarray], S: np.ndarray, rank: int) -> list[np.ndarray]:
    """Return the weights of a group as the paper has them, ``S^-1 svd_R(S [W_1 ... W_k])``, transposed."""
    U, values, Vh = np.linalg.svd(np.concatenate(Ws) @ S, full_matrices=False)
    low = (U[:, :rank] * values[:rank]) @ Vh[:rank] @ np.linalg.pinv(S)
    return np.split(low, len(Ws))


def test_every_group_is_the_svd_of_its_weights_in_the_metric_of_all_its_inputs(family, run):
    dense = tiny_model(family)
    for group, names in ((range(2), SHARED[family]), (range(2, 3), SHARED[family] + ALONE[family])):
        for name in names:
            wholes, smalls = ([layer(model, block, name) for block in group] for model in (dense, run.model))
            S = root(dense, group, name, centred=wholes[0].bias is not None)
            wanted = best([weight(whole) for whole in wholes], S, smalls[0].rank)
            for whole, small, low in zip(wholes, smalls, wanted, strict=True):
                scale = np.linalg.norm(weight(whole) @ S)
                assert np.linalg.norm((weight(small) - low) @ S) < 2e-3 * scale, name


def test_biases_take_the_mean_of_what_is_lost(run, family):
    if family == "llama":
        pytest.skip("it has no biases")
    dense = tiny_model(family)
    for name in SHARED[family]:
        whole, small = (layer(model, 1, name) for model in (dense, run.model))
        mean = inputs(dense, 1, name).mean(0)
        lost = (weight(whole) - weight(small)) @ mean + (whole.bias - small.bias).detach().double().numpy()
        assert np.abs(lost).max() < 1e-5


def test_layers_of_a_group_have_one_basis_and_others_have_their_own(family, run):
    for name in SHARED[family]:
        first, second, last = (layer(run.model, block, name) for block in range(3))
        assert first.A.weight is second.A.weight and first.A.weight is not last.A.weight
        assert first.rank == second.rank and not torch.equal(first.B.weight, second.B.weight)
    for name in ALONE[family]:
        assert layer(run.model, 0, name).A.weight is not layer(run.model, 1, name).A.weight


def test_what_is_planned_is_stored_once_loaded_and_saved_again(run, tmp_path):
    assert sum(p.numel() for p in run.model.parameters()) == run.plan.parameters_after < run.plan.parameters
    assert run.plan.sparsity == pytest.approx(0.4, abs=0.02)
    stored = 0
    for file in run.output.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            stored += sum(np.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    assert stored == run.plan.parameters_after
    assert_reloads(run.output, run.model, tmp_path / "twice")
    assert_reloads(tmp_path / "twice", run.model, tmp_path / "thrice")


def test_ties_are_made_again_where_transformers_does_not_load_the_weights(family, run):
    """As of ``load_checkpoint_and_dispatch`` of accelerate, which asks the model to tie what the file has once."""
    with torch.device("meta"):
        empty = type(run.model)._from_config(run.model.config)
    empty = copy.deepcopy(pickle.loads(pickle.dumps(empty)))
    empty.load_state_dict(run.model.state_dict(), assign=True)
    empty.tie_weights()
    for name in SHARED[family]:
        first, second = (layer(empty, block, name) for block in range(2))
        assert first.A.weight is second.A.weight and not first.A.weight.is_meta


def test_adapters_of_a_training_leave_out_what_blocks_share_and_merge_to_what_was_trained(family, run):
    pytest.importorskip("peft", reason="needs peft (pip install peft)")
    tuned = prepared(copy.deepcopy(run.model), "lora", 2, seed=0)
    reached = {name.removeprefix("base_model.model.") for name, m in tuned.named_modules() if hasattr(m, "lora_B")}
    weights = [id(tuned.get_submodule(f"base_model.model.{name}").base_layer.weight) for name in reached]
    assert weights and len(set(weights)) == len(weights)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    with torch.no_grad():
        expected = tuned.eval()(some_ids()).logits
        assert (expected - run.model(some_ids()).logits).abs().max() > 0.1
        found = tuned.merge_and_unload()(some_ids()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_in_memory_streamed_and_from_its_config_it_is_the_same_model(family, run, tmp_path):
    kept = rankfold.compress(opened(family), method=method(), calibration=tokens(48), mode="one-pass").model
    assert torch.equal(kept(some_ids()).logits, run.model(some_ids()).logits)
    kept.save_pretrained(tmp_path / "saved")
    assert_reloads(tmp_path / "saved", run.model, tmp_path / "again")
    anew = type(kept)._from_config(run.model.config)
    assert sum(p.numel() for p in anew.parameters()) == run.plan.parameters_after


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Block 1 is read back without the basis that block 0 stores."""
    options = {"method": method(), "calibration": tokens(48), "mode": "one-pass"}
    assert_ends_in_the_same_bytes(
        lambda folder: rankfold.compress(opened("llama"), output=folder, **options), tmp_path, monkeypatch
    )


def test_a_group_of_one_is_svd_llm_and_larger_groups_store_fewer_bases():
    def made(**options):
        return rankfold.compress(
            opened("llama"), method=make_method(**options), calibration=tokens(48), mode="one-pass"
        )

    common = {"sparsity": 0.4, "rank_multiple": 2}
    one, plain = made(name="basis-sharing", group_size=1, **common), made(name="svd-llm", **common)
    ids = some_ids()
    assert one.plan.parameters_after == plain.plan.parameters_after
    assert torch.allclose(one.model(ids).logits, plain.model(ids).logits, rtol=1e-4, atol=1e-5)
    two, three = (made(name="basis-sharing", group_size=size, **common) for size in (2, 3))
    counts = [len({id(layer(run.model, b, "up_proj").A.weight) for b in range(3)}) for run in (one, two, three)]
    assert counts == [3, 2, 1]
    assert [run.plan.ranks(1)["up"] for run in (one, two, three)] == [12, 14, 16]
    assert all(len(run.plan.ranks(block)) == 7 for run in (one, two, three) for block in range(3))


def test_where_there_are_experts_only_attention_shares():
    small = rankfold.compress(
        opened("mixtral"), method=method(sparsity=0.1), calibration=tokens(48), mode="one-pass"
    ).model
    shared = {name.rpartition(".")[0] for name in small.all_tied_weights_keys if "layers" in name}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in shared} == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size must be >= 1, got 0"),
        ({"bits": 4}, "got bits=4; leave it at 0, or take method svd-llm"),
        ({"junction": "lu"}, "got junction=lu; leave it at left"),
        ({"exclude_blocks": (0,)}, "several blocks one width, basis or number of experts"),
        ({"target": "vllm"}, "writes for transformers"),
    ],
)
def test_what_cannot_share_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        method(**options)


def test_blocks_that_are_not_alike_are_refused():
    source = rankfold.open_model(tiny_model("llama"), device="cpu")
    mlp = source.blocks[1].mlp
    for name, shape in (("gate_proj", (40, 32)), ("up_proj", (40, 32)), ("down_proj", (32, 40))):
        setattr(mlp, name, nn.Linear(shape[1], shape[0], bias=False))
    with pytest.raises(
        UnsupportedModelError, match="layers.1 and the block whose basis it would have differ in module 'gate'"
    ):
        rankfold.plan(source, method=method())


def test_a_basis_that_is_not_there_is_named(run, tmp_path):
    folder = tmp_path / "damaged"
    assert_reloads(run.output, run.model, folder)
    file = folder / "config.json"
    for wrong, message in (("model.layers.9.x", "does not have"), (7, "path of a layer")):
        config = json.loads(file.read_text())
        found = next(spec for spec in _specs(config["quantization_config"]["modules"]) if "basis" in spec)
        found["basis"] = wrong
        file.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            rankfold.load(folder, device="cpu")


def _specs(modules: dict):
    for spec in modules.values():
        yield spec
        yield from (part for part in spec.values() if isinstance(part, dict))
