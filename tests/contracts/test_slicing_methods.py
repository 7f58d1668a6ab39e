"""What must hold for the methods that only drop units, on every family.

The reference is the dense model with what dropped units send set to zero (FLAP: to its mean; LLM Surgeon: an output
projection solved for on raw activations), and which units these are is decided here anew, unit by unit on raw weights,
activations and gradients.
"""

import functools
import json
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, member, weight_of
from families import EXPERTS, KINDS, cached_numbers, opened, some_ids, tiny_model, tokens
from gradients import stock_gradients
from rankfold import make_method
from rankfold.errors import UnsupportedModelError
from rankfold.modules import CompressedAttention
from saved import assert_reloads

ALIBI = {"bloom", "falcon-alibi"}
DAMPING = 0.01  # of LLM Surgeon
ONE_KEY_HEAD = {"gemma", "gemma3", "gemma3-images", "falcon-mqa", "falcon-sequential"}
NAMES, BY_GRADIENT = ("magnitude", "strided", "flap"), ("obd", "llm-pruner", "kobd", "llm-surgeon")
# Families that keep their layers in different ways; the gradients themselves are measured on all in test_backward.py.
STORED = {
    "llama",
    "llama-bias",
    "phi3",
    "opt",
    "gpt2",
    "gpt_neox",
    "falcon-gqa",
    "bloom",
    "cohere2",
    "mixtral",
    "gemma",
}
CASES = [(family, name) for family in KINDS for name in NAMES + (BY_GRADIENT if family in STORED else ())]


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request) -> tuple[str, str]:
    """Family and method."""
    return request.param


@pytest.fixture(scope="module")
def run(case, tmp_path_factory):
    """DenseModel, method, folder, the model read back from it."""
    family, name = case
    source, method = opened(family), method_for(family, name)
    folder = tmp_path_factory.mktemp(name) / "small"
    rankfold.compress(source, method=method, calibration=tokens(), output=folder, mode="one-pass")
    return source, method, folder, rankfold.load(folder, device="cpu")


def modules_of(family: str) -> tuple[str, ...]:
    heads = family not in ALIBI | ONE_KEY_HEAD | {"olmo2"}  # OLMo 2 normalises over all heads together
    return (*(() if family in EXPERTS else ("mlp",)), *(("heads",) if heads else ()))


def method_for(family: str, name: str, **options):
    shares = dict.fromkeys(modules_of(family), 0.4)
    return make_method(name, **{"modules": shares, "rank_multiple": 2} | options)


@torch.no_grad()
def logits(model) -> Tensor:
    return model(some_ids()).logits


@torch.no_grad()
def inputs(model, projection: nn.Module, ids: Tensor) -> Tensor:
    seen = []
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2).double()))
    model(ids, use_cache=False)
    hook.remove()
    return torch.cat(seen)


def projections(model, index: int) -> dict[str, nn.Module]:
    block = blocks_of(model)[index]
    return {"mlp": member(block, DOWN), "heads": member(member(block, ATTENTION), OUTPUT)}


def parts_of(view, module: str, count: int) -> list[list[Tensor]]:
    """Unit -> its weights, flat, of every layer that belongs to it."""
    if module == "mlp":
        rows = [part for p in view.mlp.rising().values() for part in p.weight.split(count)]
        return [[*(part[unit] for part in rows), view.mlp.down.weight[:, unit]] for unit in range(count)]
    width = view.attention.output.weight.shape[1] // count
    heads = [p.weight.split(len(p.weight) // count) for p in view.attention.qkv()]
    output = view.attention.output.weight.split(width, 1)
    return [[*(part[unit].flatten() for part in heads), output[unit].flatten()] for unit in range(count)]


@functools.cache
def dense_model(family: str) -> nn.Module:
    """Return a tiny model that nothing changes: references read it for every module of every block."""
    return tiny_model(family)


@functools.cache
def gradients_of(family: str) -> list[dict[tuple[int, str], list[Tensor]]]:
    """Of every sequence alone: (block, module) -> unit -> gradients of its weights.

    They are put where a second model has its weights, so that the family's layout is that of the weights.
    """
    model, holder, found = tiny_model(family), opened(family), []
    for row in tokens().ids:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum")
        loss.backward()
        for held, parameter in zip(holder.model.parameters(), model.parameters(), strict=True):
            held.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        keys = [(index, module) for index in range(3) for module in modules_of(family)]
        counts = {"mlp": lambda view: view.mlp.hidden, "heads": lambda view: view.attention.kv_heads}
        found.append({})
        for index, module in keys:
            view = holder.block(index)
            units = parts_of(view, module, counts[module](view))
            found[-1][index, module] = [torch.cat(unit).double() for unit in units]
    return found


class Signals(NamedTuple):
    """What a layer computed for every token of the text, and the loss's gradient there; parts are ``(n, units, c)``."""

    outputs: list[Tensor]
    gradients: list[Tensor]


@functools.cache
def signals_of(family: str, index: int) -> dict[str, list[Signals]]:
    """Module -> layers before its output projection, in parts of one unit after another, and last that projection."""
    model, view = tiny_model(family), opened(family).block(index)
    names = {module: name for name, module in view.module.named_modules()}
    paths, caught = {name: names[module] for name, module in view.layers.items()}, {}
    for name, path in paths.items():
        layer = blocks_of(model)[index].get_submodule(path)
        layer.register_forward_hook(lambda _, __, out, name=name: caught.setdefault(name, out))
    gradients = stock_gradients(model, tokens().ids, {index: paths})
    heads, hidden = view.attention.kv_heads, view.mlp.hidden if view.mlp else 0

    def of_heads(layers: list[Tensor]) -> list[Tensor]:
        states = [x.view(*tokens().ids.shape, -1) for x in layers]
        return [x.flatten(0, 1).unflatten(1, (heads, -1)).flatten(2) for x in view.attention.split_states(states)]

    def of_units(layer: Tensor) -> list[Tensor]:
        return [part[..., None] for part in layer.flatten(0, -2).split(hidden, -1)]

    both = {name: (caught[name].detach().double(), gradients[index, name]) for name in paths}
    into = [[both[name][i] for name in ("q", "k", "v", "qkv") if name in both] for i in (0, 1)]
    attention = Signals(*map(of_heads, into))
    split = [attention] if "qkv" in both else [Signals([y], [g]) for y, g in zip(*attention, strict=True)]
    found = {"heads": [*split, Signals(*([x.flatten(0, -2)] for x in both["o"]))]}
    if view.mlp:
        rising = [Signals(*map(of_units, both[name])) for name in ("gate", "up") if name in both]
        found["mlp"] = [*rising, Signals(*([x.flatten(0, -2)] for x in both["down"]))]
    return found


def second(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def metric_of(name: str, factor: Tensor, mine: Tensor) -> Tensor:
    """What of a factor a unit's cost has: its block, or what of that the other rows cannot make up for."""
    block = factor[mine][:, mine]
    if name == "kobd":
        return block
    damping = DAMPING * factor.diagonal().mean()
    rest = torch.tensor([i for i in range(len(factor)) if i not in mine])
    told, others = factor[rest][:, mine], factor[rest][:, rest] + damping * torch.eye(len(rest))
    return block + damping * torch.eye(len(mine)) - told.T @ torch.linalg.solve(others, told)


def kronecker_costs(family: str, name: str, index: int, module: str, W: Tensor, X: Tensor, count: int) -> list[float]:
    """Half the Fisher's quadratic form, layer by layer; of rows what they computed stands for weight and input."""
    *before, last = signals_of(family, index)[module]
    centred = name == "llm-surgeon" and projections(dense_model(family), index)[module].bias is not None
    inside, after = second(X - X.mean(0) * centred), second(last.gradients[0])
    metrics, costs = [second(torch.cat([g.flatten(1) for g in layer.gradients], 1)) for layer in before], []
    for unit in range(count):
        mine = torch.arange(unit * X.shape[1] // count, (unit + 1) * X.shape[1] // count)
        cost = (metric_of(name, inside, mine) * (W[:, mine].T @ after @ W[:, mine])).sum()
        for layer, G in zip(before, metrics, strict=True):
            begin = 0
            for y in layer.outputs:
                mine = begin + torch.arange(y.shape[2]) + unit * y.shape[2]
                cost += (metric_of(name, G, mine) * second(y[:, unit])).sum()
                begin += y[0].numel()
        costs.append(cost.item() / 2)
    return costs


def expected_units(family: str, name: str, view, module: str, X: Tensor, count: int, rank: int) -> list[int]:
    """The units that stay, by the definition of each method."""
    if name == "strided":
        return [int((i + 0.5) * count / rank) for i in range(rank)]
    weights = [torch.cat(unit).double() for unit in parts_of(view, module, count)]
    W, scores = weight_of(projections(dense_model(family), view.index)[module]).double(), []
    if name in ("kobd", "llm-surgeon"):
        scores = kronecker_costs(family, name, view.index, module, W, X, count)
    for unit, weight in enumerate([] if scores else weights):
        mine = slice(unit * X.shape[1] // count, (unit + 1) * X.shape[1] // count)
        if name == "flap":
            score = (X[:, mine].var(0, correction=0) * W[:, mine].square().sum(0)).sum()
        elif name == "magnitude":
            score = weight.norm()
        else:
            changes = [gradients[view.index, module][unit] * weight for gradients in gradients_of(family)]
            score = sum(c.square() for c in changes).sum() if name == "obd" else sum(changes).abs().sum()
        scores.append(score.item())
    return sorted(sorted(range(count), key=lambda unit: -scores[unit])[:rank])


def takes_mean(name: str, projection: nn.Module) -> bool:
    return name == "flap" or (name == "llm-surgeon" and projection.bias is not None)


def left(name: str, W: Tensor, X: Tensor, kept: list[int]) -> Tensor:
    """``(D, F)`` the output projection that is left; LLM Surgeon's by least squares over tokens, with damping."""
    rest = torch.zeros_like(W)
    rest[:, kept] = W[:, kept]
    if name == "llm-surgeon":
        size = (DAMPING * X.square().sum(0).mean() / len(X)).sqrt()
        rows = torch.cat([X / len(X) ** 0.5, size * torch.eye(W.shape[1])])
        rest[:, kept] = torch.linalg.lstsq(rows[:, kept], rows @ W.T).solution.T
    return rest


class Left(NamedTuple):
    """What the reference makes of one module."""

    kept: list[int]  # channels
    weight: Tensor  # (D, F) fp64, of the output projection
    left: Tensor  # (D, F)
    mean: Tensor | float  # (F,) that the bias takes of what is lost


def expected(family: str, name: str, source, plan, index: int, module: str) -> Left:
    unit = next(m for m in plan.modules if (m.block, m.module) == (index, module))
    projection = projections(dense_model(family), index)[module]
    W, X = weight_of(projection).double(), inputs_of(family, index, module)
    keep = expected_units(family, name, source.block(index), module, X, unit.of, unit.rank)
    assert len(keep) == unit.rank < unit.of
    width, mean = W.shape[1] // unit.of, X.mean(0) if takes_mean(name, projection) else 0.0
    kept = [c for u in keep for c in range(u * width, (u + 1) * width)]
    return Left(kept, W, left(name, W, X - mean, kept), mean)


@functools.cache
def inputs_of(family: str, index: int, module: str) -> Tensor:
    dense = dense_model(family)
    return inputs(dense, projections(dense, index)[module], tokens().ids)


def reference(family: str, name: str, source, plan) -> nn.Module:
    """The dense model, dropped units silenced; what a bias takes is added after the projection."""
    model = tiny_model(family)
    for index in range(3):
        for module in modules_of(family):
            found, projection = expected(family, name, source, plan, index, module), projections(model, index)[module]
            weight_of(projection).copy_(found.left)
            sent = ((found.weight - found.left) * found.mean).sum(1).float()
            projection.register_forward_hook(lambda _, __, out, sent=sent: out + sent)
    return model


def test_the_dense_model_with_dropped_units_silenced_computes_the_same(run, case):
    source, method, _, model = run
    expected = logits(reference(*case, source, rankfold.plan(source, method=method)))
    torch.testing.assert_close(logits(model), expected, rtol=2e-4, atol=5e-5)


def test_planned_equals_actual(run):
    source, method, folder, model = run
    plan = rankfold.plan(source, method=method)
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert cached_numbers(model) * 4 == plan.kv_bytes_per_token_after
    assert json.loads((folder / "rankfold.json").read_text())["counts"]["parameters"] == plan.parameters_after


@pytest.mark.kinds
def test_folder_and_memory_and_saving_twice_give_the_same_model(run, tmp_path):
    source, method, folder, _ = run
    model = rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model
    assert_reloads(folder, model, tmp_path / "twice")


def test_errors_are_of_what_dropped_units_send(run, case):
    source, method, folder, _ = run
    family, name = case
    record, plan = json.loads((folder / "rankfold.json").read_text()), rankfold.plan(source, method=method)
    dense, text = dense_model(family), tokens()
    for module in modules_of(family):
        projection, report = projections(dense, 0)[module], record["blocks"]["0"][module]
        found = expected(family, name, source, plan, 0, module)
        for ids, key in ((text.ids, "relative_error"), (text.held_out, "held_out_error")):
            rows = inputs(dense, projection, ids) - found.mean
            error = (rows @ (found.weight - found.left).T).norm() / (rows @ found.weight.T).norm()
            assert report[key] == pytest.approx(error.item(), rel=1e-3)


def test_generation_with_cache_equals_without(run):
    model = run[3]
    ids, options = some_ids(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_sparsity_zero_leaves_the_logits_unchanged(family):
    source = opened(family)
    model = rankfold.compress(
        source, method=method_for(family, "flap", modules=modules_of(family), sparsity=0.0), calibration=tokens()
    ).model
    assert torch.equal(logits(model), logits(source.model))


def test_sequential_meets_the_budget_of_the_whole(family):
    source, sparsity = opened(family), 0.05 if family in EXPERTS else 0.2
    method = method_for(family, "flap", modules=None, sparsity=sparsity)
    model, plan = (
        rankfold.compress(source, method=method, calibration=tokens()).model,
        rankfold.plan(source, method=method),
    )
    assert plan.sparsity >= sparsity
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after


@pytest.mark.parametrize("family", sorted(ALIBI))
def test_alibi_keeps_its_heads(family):
    with pytest.raises(UnsupportedModelError, match="cannot take module 'heads': ALiBi .* it can take mlp"):
        rankfold.compress(opened(family), method=make_method("magnitude", modules=("heads",)), calibration=tokens())


def test_the_only_key_head_stays():
    with pytest.raises(UnsupportedModelError, match="cannot take module 'heads': all its query heads .* take mlp"):
        rankfold.compress(opened("gemma"), method=make_method("flap", modules=("heads",)), calibration=tokens())


def test_experts_stay():
    with pytest.raises(UnsupportedModelError, match="cannot take module 'mlp': .*mixture of experts.* take heads"):
        rankfold.compress(opened("mixtral"), method=make_method("strided", modules=("mlp",)), calibration=tokens())


def test_flap_adds_a_bias_where_there_is_none_and_counts_it():
    source = opened("llama")
    model, plain = (
        rankfold.compress(source, method=method_for("llama", n), calibration=tokens()).model
        for n in ("flap", "magnitude")
    )
    attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
    assert attention.o_proj.bias is not None and blocks_of(model)[0].mlp.down_proj.bias is not None
    numbers = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert numbers[0] - numbers[1] == 3 * 2 * 32
