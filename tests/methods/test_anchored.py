"""AA-SVD against reduced-rank regression on raw activations: no moments, no metric, no code of rankfold.

Shape legend: n tokens, N inputs and O outputs of a layer, R rank.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import rankfold
from activations import blocks_of, weight_of
from families import opened, tiny_model, tokens
from rankfold import make_method
from rankfold.calibration.offload import Offload
from rankfold.errors import OptionError
from rankfold.modules import LatentLinear
from saved import assert_reloads

FAMILIES = {  # layers of theirs whose rows are those of the latent ones
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gpt_neox": ("dense", "dense_h_to_4h", "dense_4h_to_h"),  # a parallel block
}
NAMES = {"out_proj": "o_proj", "dense": "o_proj"}  # of what has become latent


def method(name: str = "aa-svd", **options):
    return make_method(name, **{"sparsity": 0.4, "rank_multiple": 2, "ridge": 1e-7} | options)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("anchored") / "small"
    return rankfold.compress(opened(family), method=method(), calibration=tokens(48), output=folder)


@torch.no_grad()
def seen(model: nn.Module, last: tuple[str, ...]) -> dict[str, tuple[nn.Module, Tensor]]:
    """Path in the blocks, by dense names -> a layer, and what enters it, ``(n, N)``."""
    found, hooks = {}, []
    for path, layer in blocks_of(model).named_modules():
        parent, _, name = path.rpartition(".")
        dense = next((old for old, new in NAMES.items() if new == name and old in last), name)
        if dense in last and not (name == "dense" and isinstance(layer, LatentLinear)):

            def see(module, args, key=f"{parent}.{dense}"):
                found[key] = module, args[0].flatten(0, -2).double()

            hooks.append(layer.register_forward_pre_hook(see))
    model(tokens(48).ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def regressed(X: Tensor, Y: Tensor, rank: int, *, centred: bool) -> Tensor:
    """Return the outputs ``(n, O)`` of the best layer of a rank: least squares, then components of its prediction."""
    means = (X.mean(0), Y.mean(0)) if centred else (0.0, 0.0)
    X, Y = X - means[0], Y - means[1]
    predicted = (
        X @ torch.linalg.lstsq(X, Y, rcond=1e-6, driver="gelsd").solution
    )  # values of low rank leave heads narrower
    components = torch.linalg.svd(predicted, full_matrices=False).Vh[:rank]
    return predicted @ components.T @ components + means[1]


@torch.no_grad()
def outputs(layer: nn.Module, X: Tensor) -> Tensor:
    return (
        copy.deepcopy(layer).double()(X)
        if isinstance(layer, LatentLinear)
        else X @ weight_of(layer).double().T + bias_of(layer)
    )


def bias_of(layer: nn.Module) -> Tensor | float:
    return 0.0 if layer.bias is None else layer.bias.detach().double()


def test_every_layer_is_the_best_of_its_rank_for_the_dense_outputs(family, run):
    dense, small = (seen(model, FAMILIES[family]) for model in (tiny_model(family), run.model))
    compared = set()
    for path, (layer, x) in small.items():
        if not isinstance(layer, LatentLinear):
            continue
        whole, t = dense[path]
        wanted, got = outputs(whole, t), outputs(layer, x)
        best = regressed(x, wanted, layer.rank, centred=whole.bias is not None)
        error, least = (((one - wanted).norm() / wanted.norm()).item() for one in (got, best))
        assert error == pytest.approx(least, rel=2e-3) and (got - best).norm() < 0.02 * wanted.norm()
        compared.add(path.rpartition(".")[2])
    assert compared == set(FAMILIES[family])


def test_the_dense_outputs_are_missed_by_what_does_not_look_at_them(family, run):
    """After the first layers; the same with SVD-LLM, which is fitted to the weights on the same inputs."""
    plain = rankfold.compress(opened(family), method=method("svd-llm"), calibration=tokens(48)).model
    dense = seen(tiny_model(family), FAMILIES[family])
    errors = []
    for model in (run.model, plain):
        found = seen(model, FAMILIES[family])
        last = [path for path in found if path.startswith("2.")]
        wanted = {path: outputs(*dense[path]) for path in last}
        errors.append(
            sum(((outputs(*found[path]) - wanted[path]).norm() / wanted[path].norm()).item() for path in last)
        )
    assert errors[0] < 0.95 * errors[1]


def test_planned_is_what_is_loaded_and_saved(run, tmp_path):
    assert sum(p.numel() for p in run.model.parameters()) == run.plan.parameters_after < run.plan.parameters
    assert_reloads(run.output, run.model, tmp_path / "twice")


def test_every_layer_has_a_held_out_error_and_files_of_states_change_nothing(tmp_path):
    source, options = opened("llama"), {"method": method(), "calibration": tokens(48)}
    result = rankfold.compress(source, **options)
    found = [facts for block in result.record["blocks"].values() for facts in block.values()]
    low = [facts for facts in found if facts["rank"] < facts["of"]]
    assert low and all(0.6 < facts["held_out_error"] / facts["relative_error"] < 1.5 for facts in low)
    source.offload = Offload(source.device, tmp_path)
    state = rankfold.compress(source, **options).model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in result.model.state_dict().items())


@pytest.mark.parametrize("option", [{"precondition": "l2"}, {"joint": "qk"}])
def test_what_is_not_its_own_fit_is_refused(option):
    with pytest.raises(OptionError, match="leave them at rootcov and none, or take method svd-llm"):
        method(**option)
