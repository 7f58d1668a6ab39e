"""Allocations by a number of every block: these numbers from raw tensors, the budget, all ways to a result."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import rankfold
from activations import ATTENTION, DOWN, UP, blocks_of, member, weight_of
from families import EXPERTS, KINDS, opened, some_ids, tiny_model, tokens
from interrupted import assert_ends_in_the_same_bytes
from rankfold import make_method, method_names
from rankfold.allocation import OWL, Spectrum
from rankfold.errors import OptionError
from rankfold.methods import method_class

FACTOR = 2.0  # random weights have no outliers of five times the mean
TAKEN = {"owl": OWL(threshold=FACTOR, spread=0.2), "spectrum": Spectrum()}
FACTS = {"owl": "outliers", "spectrum": "effective_rank"}


@pytest.fixture(params=KINDS)
def family(request):
    return request.param


def method_for(family: str, allocation: str, **options):
    own = {"allocation": TAKEN[allocation], "sparsity": 0.1 if family in EXPERTS else 0.3, "rank_multiple": 2}
    return make_method("modegpt", **own | options)


def linears(model) -> list[list[nn.Module]]:
    """Linear layers of attention and MLP by block; no experts."""
    found = []
    for block in blocks_of(model):
        owners = [member(block, ATTENTION), *(m for m in (member(block, UP), member(block, DOWN)) if m is not None)]
        gate = [m for name, m in block.named_modules() if name == "mlp.gate_proj"]
        inside = [m for owner in (*owners, *gate) for m in owner.modules() if isinstance(m, nn.Linear | Conv1D)]
        found.append(list(dict.fromkeys(inside)))
    return found


@torch.no_grad()
def outliers(model, ids: Tensor, factor: float) -> dict[str, float]:
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda m, args: seen.update({m: args[0].flatten(0, -2).double()}))
        for layers in linears(model)
        for layer in layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = {}
    for index, layers in enumerate(linears(model)):
        scores = torch.cat([(weight_of(m).double().abs() * seen[m].norm(dim=0)).flatten() for m in layers])
        found[str(index)] = (scores > factor * scores.mean()).double().mean().item()
    return found


def effective_ranks(model) -> dict[str, float]:
    found = {}
    for index, layers in enumerate(linears(model)):
        total, count = 0.0, sum(m.weight.numel() for m in layers)
        for layer in layers:
            sigma = torch.linalg.svdvals(weight_of(layer).double())
            p = sigma / sigma.sum()
            total += layer.weight.numel() * (-(p * p.log()).sum()).exp().item() / len(p)
        found[str(index)] = total / count
    return found


def planned(source, method):
    plans = []
    model = rankfold.compress(source, method=method, calibration=tokens(), on_plan=plans.append).model
    return model, plans[0]


@pytest.mark.parametrize("allocation", FACTS)
def test_numbers_budget_and_counts(family, allocation):
    source, method = opened(family), method_for(family, allocation)
    model, plan = planned(source, method)
    dense = tiny_model(family)
    expected = outliers(dense, tokens().ids, FACTOR) if allocation == "owl" else effective_ranks(dense)
    assert plan.facts[FACTS[allocation]] == pytest.approx(expected, rel=1e-3)
    step = max(m.dense_weights // m.of * (8 if m.module == "experts" else 2) for m in plan.modules)
    wanted = method.sparsity * plan.counted_weights
    assert wanted <= plan.removed_weights < wanted + step
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after


@pytest.mark.parametrize("allocation", FACTS)
@pytest.mark.parametrize("name", [n for n in method_names() if issubclass(OWL, method_class(n).allocations)])
def test_every_method_takes_them(name, allocation):
    method = make_method(name, sparsity=0.3, rank_multiple=2, allocation=TAKEN[allocation])
    model, plan = planned(opened("llama"), method)
    assert plan.sparsity >= 0.3 and plan.method["allocation"] == str(TAKEN[allocation])
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after


def flattened(source, block: int) -> None:
    """Let the weights of a block have few directions."""
    for layer in linears(source.model)[block]:
        U, S, V = torch.linalg.svd(layer.weight.data, full_matrices=False)
        layer.weight.data = (U * S * torch.logspace(0, -1, len(S))) @ V


def gone(plan) -> list[float]:
    blocks = [[m for m in plan.modules if m.block == i] for i in range(3)]
    return [1 - sum(m.weights for m in ms) / sum(m.dense_weights for m in ms) for ms in blocks]


def test_a_block_with_few_directions_loses_most():
    source = opened("llama")
    flattened(source, 1)
    _, plan = planned(source, method_for("llama", "spectrum"))
    ranks = list(plan.facts["effective_rank"].values())
    kept = [1 - share for share in gone(plan)]
    assert ranks[1] < 0.8 * ranks[0]
    for i in range(3):
        assert kept[i] == pytest.approx(0.7 * ranks[i] / (sum(ranks) / 3), abs=0.05)


def test_blocks_with_outliers_lose_least():
    _, plan = planned(opened("llama"), method_for("llama", "owl"))
    found = list(plan.facts["outliers"].values())
    scaled = [0.4 * (x - min(found)) / (max(found) - min(found)) for x in found]
    for i, share in enumerate(gone(plan)):
        assert share == pytest.approx(0.3 + sum(scaled) / 3 - scaled[i], abs=0.05)


@pytest.mark.parametrize("allocation", FACTS)
def test_all_ways_to_one_pass_give_the_same(allocation, tmp_path):
    source, method = opened("llama"), method_for("llama", allocation)
    moments = rankfold.calibrate(source, tokens(), tmp_path / "moments")
    models = [
        rankfold.compress(source, method=method, moments=rankfold.MomentStore.open(tmp_path / "moments")).model,
        rankfold.compress(source, method=method, moments=moments).model,
        rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model,
    ]
    first, second, third = (model(some_ids()).logits for model in models)
    assert torch.equal(first, second) and torch.equal(first, third)


@pytest.mark.parametrize("allocation", FACTS)
def test_interrupted_runs_end_in_the_same_bytes(allocation, tmp_path, monkeypatch):
    method = method_for("llama", allocation)
    assert_ends_in_the_same_bytes(
        lambda folder: rankfold.compress(opened("llama"), method=method, calibration=tokens(), output=folder).output,
        tmp_path,
        monkeypatch,
    )


def test_a_plan_measures_on_text_what_its_allocation_goes_by():
    """It asked for text, which was given."""
    source, method = opened("llama"), method_for("llama", "owl")
    moments = rankfold.calibrate(source, tokens())
    planned, known = (
        rankfold.plan(source, method=method, **given) for given in ({"calibration": tokens()}, {"moments": moments})
    )
    assert [m.rank for m in planned.modules] == [m.rank for m in known.modules]
    done = rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").plan
    assert [m.rank for m in planned.modules] == [m.rank for m in done.modules]


def test_moments_without_the_squares_are_refused():
    source = opened("llama")
    moments = rankfold.calibrate(source, tokens(), statistics={"influence", "mlp_hidden", "value", "query_key"})
    with pytest.raises(
        OptionError, match="allocation owl goes by the statistic 'input_energy' .* measure them with rankfold.calibrate"
    ):
        rankfold.compress(source, method=method_for("llama", "owl"), moments=moments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"allocation": "owl:threshold=0"},
            "threshold of allocation owl must be > 0, got 0.0; the paper takes 3 to 10",
        ),
        (
            {"allocation": "owl:spread=-0.1"},
            r"spread of allocation owl must be in \[0, 1\), got -0.1; the paper takes 0.02 to 0.2",
        ),
        ({"allocation": "owl:spread=nan"}, "spread of allocation owl must be a finite number, got nan"),
        ({"allocation": "owls"}, "unknown allocation 'owls'; did you mean 'owl'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        make_method("modegpt", **options)
