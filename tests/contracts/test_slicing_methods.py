"""What must hold for the methods that only drop units, on every family.

The reference is the dense model with what dropped units send set to zero (FLAP: to its mean), and which units these are is
decided here anew, unit by unit on raw weights and activations.
"""

import functools
import json

import pytest
import torch
from torch import Tensor, nn

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, member, weight_of
from families import EXPERTS, KINDS, cached_numbers, opened, some_ids, tiny_model, tokens
from rankfold import make_method
from rankfold.errors import UnsupportedModelError
from rankfold.modules import CompressedAttention

ALIBI = {"bloom", "falcon-alibi"}
ONE_KEY_HEAD = {"gemma", "gemma3", "gemma3-images", "falcon-mqa", "falcon-sequential"}
NAMES = ("magnitude", "strided", "flap", "obd", "llm-pruner")


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, name, tmp_path_factory):
    """Source, method, folder, the model in memory."""
    source, method = opened(family), method_for(family, name)
    folder = tmp_path_factory.mktemp(name) / "small"
    rankfold.compress(source, method, tokens(), folder, mode="one-pass")
    return source, method, folder, rankfold.compress(source, method, tokens(), mode="one-pass")


def modules_of(family: str) -> tuple[str, ...]:
    heads = family not in ALIBI | ONE_KEY_HEAD | {"olmo2"}  # OLMo 2 normalises over all heads together
    return (*(() if family in EXPERTS else ("mlp",)), *(("heads",) if heads else ()))


def method_for(family: str, name: str, **options):
    shares = dict.fromkeys(modules_of(family), 0.4)
    return make_method(name, **{"modules": shares, "multiple": 2} | options)


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


def expected_units(family: str, name: str, view, module: str, X: Tensor, count: int, rank: int) -> list[int]:
    """The units that stay, by the definition of each method."""
    if name == "strided":
        return [int((i + 0.5) * count / rank) for i in range(rank)]
    weights = [torch.cat(unit).double() for unit in parts_of(view, module, count)]
    W = projections(tiny_model(family), view.index)[module]
    scores = []
    for unit in range(count):
        if name == "flap":
            mine = slice(unit * X.shape[1] // count, (unit + 1) * X.shape[1] // count)
            scores.append(
                (X[:, mine].var(0, correction=0) * weight_of(W)[:, mine].double().square().sum(0)).sum().item()
            )
        elif name == "magnitude":
            scores.append(weights[unit].norm().item())
        else:
            changes = [one[view.index, module][unit] * weights[unit] for one in gradients_of(family)]
            score = {"obd": lambda c: sum(x.square() for x in c).sum(), "llm-pruner": lambda c: sum(c).abs().sum()}[
                name
            ]
            scores.append(score(changes).item())
    return sorted(sorted(range(count), key=lambda unit: -scores[unit])[:rank])


def reference(family: str, name: str, source, plan) -> nn.Module:
    """The dense model, dropped units silenced."""
    model, dense = tiny_model(family), tiny_model(family)
    for index in range(3):
        for module in modules_of(family):
            unit = next(m for m in plan.modules if (m.block, m.module) == (index, module))
            projection = projections(model, index)[module]
            W, X = weight_of(projection), inputs(dense, projections(dense, index)[module], tokens().ids)
            keep = expected_units(family, name, source.block(index), module, X, unit.of, unit.rank)
            assert len(keep) == unit.rank < unit.of
            width = W.shape[1] // unit.of
            gone = [c for u in range(unit.of) if u not in keep for c in range(u * width, (u + 1) * width)]
            value = X[:, gone].mean(0).float() if name == "flap" else 0.0
            projection.register_forward_pre_hook(lambda _, args, gone=gone, value=value: silenced(args[0], gone, value))
    return model


def silenced(x: Tensor, gone: list[int], value) -> Tensor:
    x = x.clone()
    x[..., gone] = value
    return x


def test_the_dense_model_with_dropped_units_silenced_computes_the_same(run, family, name):
    source, method, _, model = run
    expected = logits(reference(family, name, source, rankfold.plan(source, method)))
    torch.testing.assert_close(logits(model), expected, rtol=2e-4, atol=2e-5)


def test_planned_equals_actual(run):
    source, method, folder, model = run
    plan = rankfold.plan(source, method)
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert cached_numbers(model) * 4 == plan.kv_bytes_per_token_after
    assert json.loads((folder / "rankfold.json").read_text())["counts"]["parameters"] == plan.parameters_after


def test_folder_and_memory_and_saving_twice_give_the_same_model(run, tmp_path):
    _, _, folder, model = run
    again = rankfold.load(folder, device="cpu")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))


def test_errors_are_of_what_dropped_units_send(run, family, name):
    source, method, folder, _ = run
    record, plan = json.loads((folder / "rankfold.json").read_text()), rankfold.plan(source, method)
    dense, text = tiny_model(family), tokens()
    for module in modules_of(family):
        projection, report = projections(dense, 0)[module], record["blocks"]["0"][module]
        W, X, Y = weight_of(projection).double(), *(inputs(dense, projection, x) for x in (text.ids, text.held_out))
        unit = next(m for m in plan.modules if (m.block, m.module) == (0, module))
        keep = expected_units(family, name, source.block(0), module, X, unit.of, unit.rank)
        width, centre = W.shape[1] // unit.of, X.mean(0) if name == "flap" else 0.0
        gone = [c for u in range(unit.of) if u not in keep for c in range(u * width, (u + 1) * width)]
        for rows, key in ((X, "relative_error"), (Y, "held_out_error")):
            centred = rows - centre
            error = (centred[:, gone] @ W[:, gone].T).norm() / (centred @ W.T).norm()
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
    model = rankfold.compress(source, method_for(family, "flap", modules=modules_of(family), sparsity=0.0), tokens())
    assert torch.equal(logits(model), logits(source.model))


def test_sequential_meets_the_budget_of_the_whole(family):
    source, sparsity = opened(family), 0.05 if family in EXPERTS else 0.2
    method = method_for(family, "flap", modules=None, sparsity=sparsity)
    model, plan = rankfold.compress(source, method, tokens()), rankfold.plan(source, method)
    assert plan.sparsity >= sparsity
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after


@pytest.mark.parametrize("family", sorted(ALIBI))
def test_alibi_keeps_its_heads(family):
    with pytest.raises(UnsupportedModelError, match="cannot take module 'heads': ALiBi .* it can take mlp"):
        rankfold.compress(opened(family), make_method("magnitude", modules=("heads",)), tokens())


def test_the_only_key_head_stays():
    with pytest.raises(UnsupportedModelError, match="cannot take module 'heads': all its query heads .* take mlp"):
        rankfold.compress(opened("gemma"), make_method("flap", modules=("heads",)), tokens())


def test_experts_stay():
    with pytest.raises(UnsupportedModelError, match="cannot take module 'mlp': .*mixture of experts.* take heads"):
        rankfold.compress(opened("mixtral"), make_method("strided", modules=("mlp",)), tokens())


def test_flap_adds_a_bias_where_there_is_none_and_counts_it():
    source = opened("llama")
    model, plain = (rankfold.compress(source, method_for("llama", n), tokens()) for n in ("flap", "magnitude"))
    attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
    assert attention.o_proj.bias is not None and blocks_of(model)[0].mlp.down_proj.bias is not None
    numbers = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert numbers[0] - numbers[1] == 3 * 2 * 32
