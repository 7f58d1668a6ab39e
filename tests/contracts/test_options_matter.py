"""Every option changes what it says it changes, and nothing else.

One row an option: two compressions that differ in it alone. Tensors of modules it is about differ, all others have the
same bits, and the quantity its documentation names moves the way it says. Dense moments, so that no change travels on
to later blocks. An option without a row fails.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rankfold
from activations import ATTENTION, blocks_of, look, member
from families import cached_numbers, filled_cache, opened, tokens
from rankfold import LatentLLM, MoDeGPT, method_names
from rankfold.allocation import ALLOCATIONS, BUDGETS, OWL, Bytes, FLOPs, Influence
from rankfold.errors import NumericsError
from rankfold.methods import method_class
from rankfold.methods.baselines.block_removal import BlockRemoval
from rankfold.methods.baselines.reap import REAP
from rankfold.methods.baselines.semi_structured import TwoOfFour
from rankfold.methods.baselines.slicegpt.method import SliceGPT
from rankfold.methods.baselines.structured.method import Slicing
from rankfold.methods.baselines.structured.variants import FLAP

UNITS = {  # submodule of a block -> what the latent methods call it
    **{f"{name}_proj": name for name in ("q", "k", "v", "qkv", "o", "gate", "up", "down")},
    **{"out_proj": "o", "fc1": "up", "fc2": "down", "mlp.c_fc": "up", "mlp.c_proj": "down", "rotary_pairs": "q"},
}
PAIRS = {"q": "qk", "k": "qk", "v": "vo", "o": "vo", "gate": "mlp", "up": "mlp", "down": "mlp"}  # what MoDeGPT does
ALL = {
    MoDeGPT: ("mlp", "qk", "vo"),
    LatentLLM: ("q", "k", "v", "o", "gate", "up", "down"),
    Slicing: ("mlp", "heads"),
}
SPEAKS_FOR = {Slicing: FLAP}  # where all methods of a kind have the same options, the one that is run
OPT = ("q", "k", "v", "o", "up", "down")
MLP = {"mlp", "gate", "up", "down"}


class Outcome(NamedTuple):
    """What a compression gave."""

    source: rankfold.DenseModel
    model: torch.nn.Module
    record: dict  # block -> module -> report
    plan: rankfold.Plan
    module_of: Callable[[str], str | None]

    def tensors(self, model=None) -> dict[tuple[int, str | None], dict[str, Tensor]]:
        """By block and module; ``None`` is what no method touches."""
        found: dict = {}
        for index, block in enumerate(blocks_of(model or self.model)):
            for name, tensor in block.state_dict().items():
                found.setdefault((index, self.module_of(name)), {})[name] = tensor
        return found

    def errors(self, module: str) -> Tensor:
        return torch.tensor([report[module]["relative_error"] for report in self.record.values() if module in report])

    def ranks(self, module: str) -> Tensor:
        return torch.tensor([self.plan.ranks(i)[module] for i in range(len(self.source))])

    def gone(self, *modules: str) -> Tensor:
        """Fraction of the weights removed from these modules of every block."""
        here = [[m for m in self.plan.modules if m.block == i and m.module in modules] for i in range(len(self.source))]
        return torch.tensor([1 - sum(m.weights for m in ms) / sum(m.dense_weights for m in ms) for ms in here])


def unit_of(name: str) -> str | None:
    return next((unit for part, unit in UNITS.items() if f"{part}." in f"{name}." and part in name), None)


def pair_of(name: str) -> str | None:
    return PAIRS.get(unit_of(name))


def half_of(name: str) -> str | None:
    pair = pair_of(name)
    return "heads" if pair in ("qk", "vo") else pair


MODULE_OF = {MoDeGPT: pair_of, LatentLLM: unit_of, Slicing: half_of}


OUTCOMES: dict[tuple[str, str], Outcome] = {}


def outcome(method, family: str) -> Outcome:
    """What a method gives, once: many rows begin with the same options."""
    key = family, repr(method)
    if key not in OUTCOMES:
        source = opened(family)
        result = rankfold.compress(source, method=method, calibration=tokens(32), mode="one-pass")
        module_of = next(function for base, function in MODULE_OF.items() if isinstance(method, base))
        OUTCOMES[key] = Outcome(source, result.model, result.record["blocks"], result.plan, module_of)
    return OUTCOMES[key]


def changed(a: dict, b: dict) -> set:
    """Keys of two ``tensors()`` whose tensors are not the same bits under the same names."""

    def same(x: dict | None, y: dict | None) -> bool:
        return x is not None and y is not None and x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)

    return {key for key in a.keys() | b.keys() if not same(a.get(key), b.get(key))}


# ---------------------------------------------------------------------------------------------------------------------
# What moves


def errors_rise(*modules: str):
    def check(a: Outcome, b: Outcome) -> None:
        for module in modules:
            assert (a.errors(module) < b.errors(module)).all(), module

    return check


def errors_do_not_fall(module: str):
    """A block may keep the same; not all of them."""

    def check(a: Outcome, b: Outcome) -> None:
        assert (a.errors(module) <= b.errors(module)).all() and (a.errors(module) < b.errors(module)).any()

    return check


def errors_fall(*modules: str):
    return lambda a, b: errors_rise(*modules)(b, a)


def ranks_fall_and_errors_rise(*modules: str):
    def check(a: Outcome, b: Outcome) -> None:
        assert all((a.ranks(module) > b.ranks(module)).all() for module in modules)
        errors_rise(*modules)(a, b)

    return check


def each(*checks):
    def check(a: Outcome, b: Outcome) -> None:
        for one in checks:
            one(a, b)

    return check


def more_is_removed(a: Outcome, b: Outcome) -> None:
    for o in (a, b):
        assert o.plan.removed_weights >= o.plan.method["sparsity"] * o.plan.counted_weights
    assert a.plan.removed_weights < b.plan.removed_weights
    assert sum(p.numel() for p in a.model.parameters()) > sum(p.numel() for p in b.model.parameters())


def the_model_is_what_counts(a: Outcome, b: Outcome) -> None:
    model = sum(p.numel() for p in b.source.model.parameters())
    blocks = sum(p.numel() for p in b.source.blocks.parameters() if p.dim() == 2)
    assert (a.plan.counted_weights, b.plan.counted_weights) == (blocks, model)
    assert a.plan.removed_weights < 0.2 * model <= b.plan.removed_weights


def products_count(a: Outcome, b: Outcome) -> None:
    """Beside the weights of 3 blocks, both products of 4 heads of 8 dimensions with each of the 64 positions."""
    linear = sum(p.numel() for p in b.source.blocks.parameters() if p.dim() == 2)
    assert b.plan.budget["counted"] == linear + 3 * 2 * 4 * 8 * 64 > a.plan.budget["counted"]
    for o in (a, b):
        assert o.plan.budget["removed"] >= 0.2 * o.plan.budget["counted"]


def the_cache_counts(a: Outcome, b: Outcome) -> None:
    """Beside the bytes of the blocks, those of 64 x 64 tokens in the caches, before and after."""
    before, after = (4 * cached_numbers(model) * 64 * 64 for model in (b.source.model, b.model))
    assert b.plan.budget["counted"] - a.plan.budget["counted"] == before
    assert b.plan.budget["removed"] == b.plan.bytes - b.plan.bytes_after + before - after


def only(*named: str):
    """Only these modules are compressed, and they make up for the rest."""

    def check(a: Outcome, b: Outcome) -> None:
        touched = changed(b.tensors(), b.tensors(b.source.model))
        assert {module for _, module in touched} == set(named)
        assert all((a.gone(module) < b.gone(module)).all() for module in named)

    return check


def own_sparsities(wanted: dict[str, float]):
    def check(a: Outcome, b: Outcome) -> None:
        only_these = {m.module for m in b.plan.modules}
        assert only_these == set(wanted)
        for module, sparsity in wanted.items():
            mine = [m for m in b.plan.modules if m.module == module]
            total, step = sum(m.dense_weights for m in mine), mine[0].dense_weights // mine[0].of
            removed = total - sum(m.weights for m in mine)
            assert sparsity * total <= removed < sparsity * total + 4 * step

    return check


@torch.no_grad()
def influences(outcome: Outcome) -> Tensor:
    """``(blocks, 3)`` mean of one minus the cosine across a Llama block, its attention and its MLP."""
    states: list[Tensor] = []
    hooks = []
    for block in blocks_of(outcome.source.model):
        hooks.append(block.register_forward_hook(lambda _, args, out: states.extend((args[0], out))))
        hooks.append(block.post_attention_layernorm.register_forward_pre_hook(lambda _, args: states.append(args[0])))
    outcome.source.model(tokens(32).ids)
    for hook in hooks:
        hook.remove()
    rows = []
    for middle, before, after in zip(states[::3], states[1::3], states[2::3], strict=True):
        pairs = (before, after), (before, middle), (middle, after)
        rows.append(torch.stack([1 - torch.cosine_similarity(*pair, dim=-1).mean() for pair in pairs]))
    return torch.stack(rows)


def lose_by(scores: Tensor, gone: Tensor, outcome: Outcome) -> None:
    """Sparsities are proportional to ``exp(-score / epsilon)``, but for whole ranks and for what cannot go."""
    assert outcome.plan.removed_weights >= outcome.plan.method["sparsity"] * outcome.plan.counted_weights
    free = (gone > 0.05) & (gone < 0.85)
    logarithms = gone[free].log() + scores[free] / outcome.plan.facts["temperature"]
    assert free.sum() > 1 and logarithms.max() - logarithms.min() < (0.2 if outcome.module_of is unit_of else 0.6)
    assert gone[scores.argmin()] == gone.max() > 0.3 + gone[scores.argmax()]


def blocks_lose_by_influence(a: Outcome, b: Outcome) -> None:
    modules = a.plan.ranks(0)
    assert a.gone(*modules).max() - a.gone(*modules).min() < 0.06  # steps of ranks
    lose_by(influences(b)[:, 0], b.gone(*modules), b)


def halves_lose_by_influence(a: Outcome, b: Outcome) -> None:
    """Eq. 43, ``w`` the share of the half in the parameters of its block, times 3."""
    mlp = MLP & set(a.plan.ranks(0))
    halves = [set(a.plan.ranks(0)) - mlp, mlp]
    sizes = torch.tensor([sum(m.dense_weights for m in a.plan.modules if m.module in half) for half in halves])
    weighted = influences(b)[:, 1:] * 3 * sizes / sizes.sum()
    lose_by(weighted.flatten(), torch.stack([b.gone(*half) for half in halves], 1).flatten(), b)


def outliers_are_fewer(a: Outcome, b: Outcome) -> None:
    """Which they are: test_shares_of_blocks.py."""
    few, many = (list(o.plan.facts["outliers"].values()) for o in (b, a))
    assert all(0 < x < y for x, y in zip(few, many, strict=True))


def blocks_differ_more(a: Outcome, b: Outcome) -> None:
    near, far = (o.gone(*{m.module for m in o.plan.modules}) for o in (a, b))
    assert far.max() - far.min() > 0.2 + near.max() - near.min()


def blocks_differ_less(a: Outcome, b: Outcome) -> None:
    modules = {m.module for m in a.plan.modules}
    cold, hot = (o.gone(*modules) for o in (a, b))
    assert hot.max() - hot.min() < 0.06 < cold.max() - cold.min()


def ranks_are_multiples(a: Outcome, b: Outcome) -> None:
    for o, multiple in ((a, 8), (b, 2)):
        assert all(m.rank % multiple == 0 or m.rank == m.of for m in o.plan.modules)
    assert any(m.rank % 8 for m in b.plan.modules if m.rank < m.of)
    assert a.plan.removed_weights >= b.plan.removed_weights >= 0.25 * b.plan.counted_weights


def dense_blocks(*protected: int):
    def check(a: Outcome, b: Outcome) -> None:
        touched = {block for block, _ in changed(b.tensors(), b.tensors(b.source.model))}
        assert touched == set(range(len(b.source))) - set(protected)
        assert a.gone(*a.plan.ranks(1))[1] < b.gone(*b.plan.ranks(1))[1]

    return check


@torch.no_grad()
def score_error(outcome: Outcome, offsets: int | None = None) -> float:
    """Relative error of the scores of block 0: every query with every key, or with the keys at most so far after."""
    ids = tokens(32).ids
    scores = []
    for model in (outcome.source.model, outcome.model):
        q, k, _ = look(model, ids, 0).heads
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        far = q.transpose(0, 1).flatten(1, 2) @ k.transpose(0, 1).flatten(1, 2).mT if offsets is None else q @ k.mT
        distance = torch.arange(far.shape[-2])[:, None] - torch.arange(far.shape[-1])
        scores.append(far if offsets is None else far * ((distance >= 0) & (distance <= offsets)))
    return ((scores[0] - scores[1]).norm() / scores[0].norm()).item()


def scores_get_worse(a: Outcome, b: Outcome) -> None:
    assert score_error(a) < 0.99 * score_error(b)


def scores_get_better(a: Outcome, b: Outcome) -> None:
    assert score_error(b) < 0.99 * score_error(a)


def the_better_form_is_taken(a: Outcome, b: Outcome) -> None:
    """Joint in some block at least, and wherever that is better on rows that were not fitted."""
    reports = [report["up"] for report in b.record.values()]
    assert any(report["form"] == "joint up-down" for report in reports)
    for report in reports:
        better = report["form_errors"]["joint"] <= report["form_errors"]["local"]
        assert report["form"] == ("joint up-down" if better else "local (joint up-down was worse held out)")


def rounds_go_on(a: Outcome, b: Outcome) -> None:
    joint = [i for i in a.record if all(o.record[i]["up"]["form"] == "joint up-down" for o in (a, b))]
    assert joint
    for index in joint:
        none, four = (o.record[index]["up"]["loss_history"] for o in (a, b))
        assert (len(none), len(four)) == (1, 5) and four[-1] < none[-1]


@torch.no_grad()
def the_model_keeps_its_best_pairs(a: Outcome, b: Outcome) -> None:
    """All heads of all blocks the same ones: of the six choices those that change the dense scores least, relatively.

    Keys are centred over the window, and changes summed over blocks.
    """
    chosen = {tuple(row) for block in blocks_of(b.model) for row in block.self_attn.rotary_pairs.tolist()}
    assert len(chosen) == 1 < len({tuple(row) for x in blocks_of(a.model) for row in x.self_attn.rotary_pairs.tolist()})
    assert all((b.ranks(module) == 4).all() for module in ("qk", "vo"))
    lost = dict.fromkeys(combinations(range(4), 2), 0.0)
    for index in range(3):
        q, k, _ = look(b.source.model, tokens(32).ids, index).heads
        k = (k - k.mean(2, keepdim=True)).repeat_interleave(q.shape[1] // k.shape[1], 1)
        for kept in lost:
            gone = [p + half for half in (0, 4) for p in range(4) if p not in kept]
            lost[kept] += ((q[..., gone] @ k[..., gone].mT).norm() / (q @ k.mT).norm()).item() ** 2
    assert chosen == {min(lost, key=lost.get)}


def near_scores_get_better(a: Outcome, b: Outcome) -> None:
    assert score_error(b, 5) < 0.99 * score_error(a, 5)
    assert all("window 5" in report["q"]["form"] for report in b.record.values())


@torch.no_grad()
def attention_error(outcome: Outcome) -> float:
    """Relative error of what the attention of block 0 adds to the stream."""
    sent = []
    for model in (outcome.source.model, outcome.model):
        attention = member(blocks_of(model)[0], ATTENTION)
        hook = attention.register_forward_hook(lambda _, __, out: sent.append(out[0]))
        model(tokens(32).ids)
        hook.remove()
    return ((sent[0] - sent[1]).norm() / sent[0].norm()).item()


def biases_stay(*modules: str):
    """Biases of these modules move at first, and stay what they were afterwards."""

    def check(a: Outcome, b: Outcome) -> None:
        for key, tensors in b.tensors().items():
            for name, tensor in tensors.items():
                if key[1] in modules and name.endswith("bias"):
                    dense = b.tensors(b.source.model)[key].get(name)
                    moved = a.tensors()[key].get(name)  # of values: gone, or zero
                    if dense is not None and len(dense) == len(tensor):
                        assert torch.equal(tensor, dense), name
                        assert moved is None or not torch.equal(moved, dense), name

    return check


def bias_of_values_is_stored_again(a: Outcome, b: Outcome) -> None:
    wide = sum(parts["self_attn.v_proj.bias"].numel() for key, parts in b.tensors().items() if key[1] == "vo")
    assert not any("self_attn.v_proj.bias" in parts for parts in a.tensors().values())
    assert b.plan.parameters_after - a.plan.parameters_after == wide > 0


def histories_are_longer(*modules: str):
    def check(a: Outcome, b: Outcome) -> None:
        for module in modules:
            for index in a.record:
                short, long = (o.record[index][module]["loss_history"] for o in (a, b))
                assert len(short) < len(long) and long[-1] <= short[-1]

    return check


def tends_to_the_identity(a: Outcome, b: Outcome) -> None:
    """``E|x|`` to the power of nearly zero is one for every input."""
    source = b.source
    plain = LatentLLM(**LOCAL, precondition="identity")
    ranks, moments = rankfold.plan(source, method=plain).ranks(0), rankfold.calibrate(source, tokens(32))[0]
    reports = plain.decompose(source.block(0), dict(moments), ranks).reports
    expected = torch.tensor([report["relative_error"] for report in reports.values()])
    before, after = (torch.stack([o.errors(module)[0] for module in reports]) for o in (a, b))
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(before, expected, rtol=1e-3)


@torch.no_grad()
def heads_are_cached(a: Outcome, b: Outcome) -> None:
    sizes = []
    for o in (a, b):
        layers = filled_cache(o.model, tokens(32).ids[:1]).layers
        width = sum(t.shape[1] * t.shape[3] * t.element_size() for layer in layers for t in (layer.keys, layer.values))
        assert width == o.plan.kv_bytes_per_token_after
        sizes.append(width)
    assert sizes[0] < sizes[1] == b.plan.kv_bytes_per_token
    torch.testing.assert_close(a.model(tokens(32).ids).logits, b.model(tokens(32).ids).logits)


def bytes_fall(a: Outcome, b: Outcome) -> None:
    stored = [sum(t.numel() * t.element_size() for t in o.model.state_dict().values()) for o in (a, b)]
    assert stored[1] < stored[0] and b.plan.bytes_after < a.plan.bytes_after


def a_share_is_sparse(a: Outcome, b: Outcome) -> None:
    for report in b.record.values():
        assert all(part["nonzeros"] > 0 and "sparse" in part["form"] for part in report.values())
    assert all("nonzeros" not in part for report in a.record.values() for part in report.values())
    assert all((a.ranks(m) > b.ranks(m)).all() for m in ALL[LatentLLM])


@torch.no_grad()
def corrected_entries_are_exact(a: Outcome, b: Outcome) -> None:
    """The closed form puts what the low rank leaves; the others fit all their entries together."""
    for o, exact in ((a, False), (b, True)):
        for block, dense in zip(blocks_of(o.model), blocks_of(o.source.model), strict=True):
            layer, weight = block.mlp.up_proj, dense.mlp.up_proj.weight
            rows = torch.repeat_interleave(torch.arange(len(weight)), layer.sparse.starts.diff())
            columns = layer.sparse.columns.long()
            found = layer(torch.eye(weight.shape[1])).T[rows, columns]
            assert torch.allclose(found, weight[rows, columns], atol=1e-5) == exact


def all_values_are_single(a: Outcome, b: Outcome) -> None:
    """As many numbers as of the low rank, none of them in factors, and an index beside each."""
    assert abs(a.plan.removed_weights - b.plan.removed_weights) < 0.02 * b.plan.counted_weights
    assert b.plan.bytes_after > a.plan.bytes_after
    for index in range(len(b.source)):
        for module in b.plan.ranks(index):
            stored = b.tensors()[index, module]
            assert {name.rpartition("_proj.")[2] for name in stored} == {f"sparse.{n}" for n in SPARSE_TENSORS}
            report = b.record[str(index)][module]
            values = next(t for name, t in stored.items() if name.endswith("values"))
            assert report["form"] == "local, sparse" and report["nonzeros"] == values.numel()
            assert (
                values.count_nonzero()
                == values.numel()
                == report["rank"] * (next(t for name, t in stored.items() if name.endswith("starts")).numel() - 1)
            )


def shares_a_latent(a: Outcome, b: Outcome) -> None:
    names = {m.module for m in b.plan.modules}
    assert "qkv" in names and not names & {"q", "k", "v"}
    assert b.plan.kv_bytes_per_token_after < b.plan.kv_bytes_per_token


def ranks_are_of_heads(a: Outcome, b: Outcome) -> None:
    for module, full in (("q", 32), ("k", 16), ("v", 16)):
        assert {m.of for m in a.plan.modules if m.module == module} == {full}
        assert {m.of for m in b.plan.modules if m.module == module} == {8}
        assert all(report[module]["form"] == "local, split heads" for report in b.record.values())


def an_identity_is_not_stored(a: Outcome, b: Outcome) -> None:
    """What it saves is spent on rank."""
    for index, module in product(range(len(a.source)), "kv"):
        rank = [o.plan.ranks(index)[module] for o in (a, b)]
        stored = [
            sum(t.numel() for n, t in o.tensors()[index, module].items() if t.is_floating_point() and "bias" not in n)
            for o in (a, b)
        ]
        dense = rank[1] * (32 + 32 - rank[1])
        assert rank[0] <= rank[1] and stored[1] == dense - 4 * 8**2
        assert "head_condition" in b.record["0"][module] and "head_condition" not in a.record["0"][module]


def attention_sends_what_it_sent(a: Outcome, b: Outcome) -> None:
    assert attention_error(b) < 0.99 * attention_error(a)


def ranks_follow_the_spectra(a: Outcome, b: Outcome) -> None:
    for index, report in b.record.items():
        q, k = report["q"], report["k"]
        assert q["weights"] + k["weights"] <= q["planned_weights"] + k["planned_weights"]
        assert {m: report[m]["planned_rank"] for m in "qk"} == {m: a.record[index][m]["rank"] for m in "qk"}
    assert any(r[m]["rank"] != r[m]["planned_rank"] for r in b.record.values() for m in "qk")


# ---------------------------------------------------------------------------------------------------------------------
# The rows


class Row(NamedTuple):
    option: str
    before: dict
    after: dict
    affected: Collection[str]  # modules; others keep their bits
    moves: Callable[[Outcome, Outcome], None]
    family: str = "llama"
    everywhere: bool = True  # all affected modules of all blocks change; else some of them


def common(cls, base: dict) -> list[Row]:
    """Options that all methods have."""
    every = ALL[cls]
    if cls is MoDeGPT:
        own, one = {"mlp": 0.35, "vo": 0.4}, ("mlp",)
    else:
        own, one = {"up": 0.35, "o": 0.4}, ("gate", "up", "down")
    budget = base | {"sparsity": 0.2}
    flops, in_bytes = budget | {"budget": FLOPs()}, budget | {"budget": Bytes()}
    influential, warm = (base | {"allocation": Influence(temperature=t)} for t in (None, 1e4))
    owl, wide = (base | {"allocation": OWL(threshold=1.5, spread=spread)} for spread in (0.01, 0.2))
    fewer = base | {"allocation": OWL(threshold=2.5, spread=0.2)}
    coarse = base | {"sparsity": 0.25, "rank_multiple": 8, "modules": one}
    return [
        Row("sparsity", budget, base | {"sparsity": 0.4}, every, each(more_is_removed, errors_rise(*every))),
        Row("scope", budget, budget | {"scope": "model"}, every, the_model_is_what_counts, everywhere=False),
        Row("budget", budget, budget | {"budget": "flops"}, every, products_count, everywhere=False),
        Row("budget.context", flops | {"budget": FLOPs(context=8)}, flops, every, products_count, everywhere=False),
        Row(
            "budget.batch", in_bytes, in_bytes | {"budget": Bytes(batch=64)}, every, the_cache_counts, everywhere=False
        ),
        Row("modules", budget, budget | {"modules": one}, every, only(*one)),
        Row("modules", budget, budget | {"modules": own}, every, own_sparsities(own), everywhere=False),
        Row("allocation", base, influential, every, blocks_lose_by_influence, everywhere=False),
        Row(
            "allocation",
            base,
            base | {"allocation": "influence-modules"},
            every,
            halves_lose_by_influence,
            everywhere=False,
        ),
        Row(
            "allocation.temperature",
            influential,
            warm,
            every,
            blocks_differ_less,
            everywhere=False,
        ),
        Row(
            "allocation.threshold",
            wide,
            fewer,
            every,
            outliers_are_fewer,
            everywhere=False,
        ),
        Row("allocation.spread", owl, wide, every, blocks_differ_more, everywhere=False),
        Row("rank_multiple", coarse, coarse | {"rank_multiple": 2}, set(one), ranks_are_multiples, everywhere=False),
        Row("exclude_blocks", budget, budget | {"exclude_blocks": (0,)}, every, dense_blocks(0), everywhere=False),
        Row(
            "exclude_blocks", budget, budget | {"exclude_blocks": (0, -1)}, every, dense_blocks(0, 2), everywhere=False
        ),
    ]


def slicing(every: Collection[str], mlp: Collection[str]) -> list[Row]:
    """As :func:`common`; these Llamas have two key heads, and one is too coarse a step for what the MLP can show."""
    both, base = SMALL | {"sparsity": 0.3}, SMALL | {"modules": mlp}
    budget = base | {"sparsity": 0.2}
    influential, warm = (base | {"allocation": Influence(temperature=t)} for t in (None, 1e4))
    flops, in_bytes = budget | {"budget": FLOPs()}, both | {"budget": Bytes()}
    owl, wide = (base | {"allocation": OWL(threshold=1.5, spread=spread)} for spread in (0.01, 0.2))
    fewer = base | {"allocation": OWL(threshold=2.5, spread=0.2)}
    coarse = base | {"sparsity": 0.25, "rank_multiple": 8}
    return [
        Row("sparsity", budget, base | {"sparsity": 0.4}, mlp, each(more_is_removed, errors_rise(*mlp))),
        Row("scope", budget, budget | {"scope": "model"}, mlp, the_model_is_what_counts, everywhere=False),
        Row("budget", budget, flops, mlp, products_count, everywhere=False),
        Row("budget.context", flops | {"budget": FLOPs(context=8)}, flops, mlp, products_count, everywhere=False),
        Row(
            "budget.batch", in_bytes, in_bytes | {"budget": Bytes(batch=64)}, every, the_cache_counts, everywhere=False
        ),
        Row("modules", both, both | {"modules": mlp}, every, only(*mlp)),
        Row("allocation", base, influential, mlp, blocks_lose_by_influence, everywhere=False),
        Row(
            "allocation.temperature",
            influential,
            warm,
            mlp,
            blocks_differ_less,
            everywhere=False,
        ),
        Row(
            "allocation.threshold",
            wide,
            fewer,
            mlp,
            outliers_are_fewer,
            everywhere=False,
        ),
        Row("allocation.spread", owl, wide, mlp, blocks_differ_more, everywhere=False),
        Row("rank_multiple", coarse, coarse | {"rank_multiple": 2}, mlp, ranks_are_multiples, everywhere=False),
        Row("exclude_blocks", budget, budget | {"exclude_blocks": (0,)}, mlp, dense_blocks(0), everywhere=False),
    ]


SMALL = {"rank_multiple": 2}
LATENT = {"rank_multiple": 1}
LOCAL = {**LATENT, "joint": "none"}
SPARSE = {**LOCAL, "sparse": 0.2}
ALONE = {**LOCAL, "sparse": 1.0}
SPARSE_TENSORS = ("values", "columns", "starts")
BITS = {**LOCAL, "bits": 4, "chunk": 8}
PROJECTIONS = {"o": 0.3, "up": 0.3}
ROWS = {
    MoDeGPT: [
        *common(MoDeGPT, SMALL),
        Row("gqa", SMALL, SMALL | {"gqa": "paper"}, {"vo"}, errors_rise("vo")),
        Row("qk", SMALL, SMALL | {"qk": "cr"}, {"qk"}, scores_get_worse, "opt"),
        Row(
            "bias_refit",
            SMALL,
            SMALL | {"bias_refit": False},
            {"mlp", "vo"},
            each(biases_stay("mlp", "vo"), bias_of_values_is_stored_again),
            "llama-bias",
        ),
        Row("ridge", SMALL, SMALL | {"ridge": 1e3}, {"mlp"}, errors_rise("mlp")),
        Row(
            "ridge_scale",
            SMALL | {"ridge": 1e3, "ridge_scale": "absolute"},
            SMALL | {"ridge": 1e3},
            {"mlp"},
            errors_rise("mlp"),
        ),
        Row("selection", SMALL, SMALL | {"selection": "leverage"}, {"mlp"}, errors_rise("mlp")),
        # What is least in the metric of the gradient is not least in that of the outputs.
        Row(
            "output_weighting",
            SMALL,
            SMALL | {"output_weighting": "fisher"},
            {"mlp", "vo"},
            each(errors_rise("vo"), errors_do_not_fall("mlp")),
            everywhere=False,
        ),
        Row("head_dim", SMALL, SMALL | {"head_dim": 4}, {"mlp", "qk", "vo"}, the_model_keeps_its_best_pairs),
        Row(
            "selection_qk", SMALL, SMALL | {"selection_qk": "norm"}, {"qk"}, errors_do_not_fall("qk"), everywhere=False
        ),
    ],
    LatentLLM: [
        *common(LatentLLM, LOCAL),
        Row("precondition", LOCAL, LOCAL | {"precondition": "identity"}, ALL[LatentLLM], errors_rise(*ALL[LatentLLM])),
        Row(
            "junction",
            LOCAL,
            LOCAL | {"junction": "symmetric"},
            ALL[LatentLLM],
            ranks_fall_and_errors_rise(*ALL[LatentLLM]),
        ),
        Row("joint", LOCAL | {"joint": "none"}, LATENT | {"joint": "auto"}, {"q", "k"}, scores_get_better),
        Row(
            "joint",
            LOCAL,
            LATENT,
            {"q", "k", "up", "down"},
            each(scores_get_better, the_better_form_is_taken),
            "opt",
            False,
        ),
        Row("joint", LATENT | {"joint": "qk"}, LATENT | {"joint": "qk,vo"}, {"v", "o"}, lambda a, b: None, "opt"),
        Row(
            "alternations",
            LATENT | {"alternations": 1},
            LATENT,
            {"q", "k"},
            each(histories_are_longer("q", "k"), errors_fall("q", "k")),
        ),
        Row("window", LATENT | {"window": 0}, LATENT, {"q", "k"}, near_scores_get_better),
        Row(
            "rounds",
            LATENT | {"rounds": 0},
            LATENT,
            {"up", "down"},
            rounds_go_on,
            "opt",
            False,
        ),
        Row("ridge", LOCAL, LOCAL | {"ridge": 1.0}, ALL[LatentLLM], errors_rise(*ALL[LatentLLM])),
        Row(
            "alpha",
            LOCAL | {"precondition": "l1"},
            LOCAL | {"precondition": "l1", "alpha": 1e-6},
            ALL[LatentLLM],
            tends_to_the_identity,
        ),
        Row("bias_refit", LOCAL, LOCAL | {"bias_refit": False}, OPT, biases_stay(*OPT), "opt"),
        Row("condition_limit", LATENT, LATENT | {"condition_limit": 1e12}, set(), lambda a, b: None),
        Row("latent_cache", LATENT, LATENT | {"latent_cache": False}, set(), heads_are_cached, "opt"),
        Row("bits", LOCAL, BITS, ALL[LatentLLM], each(bytes_fall, errors_rise(*ALL[LatentLLM]))),
        Row(
            "chunk",
            BITS,
            BITS | {"chunk": 64},
            ALL[LatentLLM],
            each(bytes_fall, errors_rise("q", "o", "gate", "up", "down")),
        ),
        Row("sparse", LOCAL, SPARSE, ALL[LatentLLM], a_share_is_sparse),
        Row("sparse", LOCAL, ALONE, ALL[LatentLLM], all_values_are_single),
        Row("shrink", ALONE, ALONE | {"shrink": "diagonal"}, ALL[LatentLLM], corrected_entries_are_exact),
        Row("ridge", ALONE, ALONE | {"ridge": 1.0}, ALL[LatentLLM], errors_rise(*ALL[LatentLLM])),
        Row("bias_refit", ALONE, ALONE | {"bias_refit": False}, OPT, biases_stay(*OPT), "opt"),
        Row("shrink", SPARSE, SPARSE | {"shrink": "diagonal"}, ALL[LatentLLM], corrected_entries_are_exact),
        Row(
            "shared_qkv",
            LOCAL | {"modules": dict.fromkeys("qkv", 0.4) | PROJECTIONS},
            LOCAL | {"modules": {"qkv": 0.4, **PROJECTIONS}, "shared_qkv": True},
            {"q", "k", "v", "qkv"},
            shares_a_latent,
        ),
        Row(
            "split_head",
            LOCAL | {"modules": dict.fromkeys("qkv", 0.4) | PROJECTIONS, "junction": "symmetric"},
            LOCAL | {"modules": dict.fromkeys("qkv", 0.4) | PROJECTIONS, "junction": "symmetric", "split_head": True},
            {"q", "k", "v"},
            ranks_are_of_heads,
        ),
        Row(
            "head_junction",
            LATENT | {"modules": dict.fromkeys("qkvo", 0.4)},
            LATENT | {"modules": dict.fromkeys("qkvo", 0.4), "head_junction": True},
            {"q", "k", "v", "o"},
            an_identity_is_not_stored,
            "opt",
        ),
        Row(
            "attention_aware",
            LATENT | {"joint": "vo", "modules": ("v", "o"), "sparsity": 0.15},
            LATENT | {"joint": "vo", "modules": ("v", "o"), "sparsity": 0.15, "attention_aware": True},
            {"o"},
            attention_sends_what_it_sent,
        ),
        Row(
            "qk_ranks", LATENT, LATENT | {"qk_ranks": "spectra"}, {"q", "k"}, ranks_follow_the_spectra, everywhere=False
        ),
    ],
    Slicing: slicing(("mlp", "heads"), ("mlp",)),
}
# On the compressed stream: test_rankfold.py, test_whole_modules.py, test_slicegpt_modegpt.py. Experts:
# test_expert_counts.py. Blocks together: test_basis_sharing.py.
ELSEWHERE = {
    "basis-sharing": {"group_size"},
    "rankfold": {
        "attention_aware",
        "residual_correction",
        "norm_aware",
        "allow_module_removal",
        "allow_expert_removal",
    },
    "slicegpt+modegpt": {"slicing"},
}
# test_removal.py, test_reap.py, test_slicegpt.py, test_semi_structured_methods.py
OTHERS = (BlockRemoval, REAP, SliceGPT, TwoOfFour)
CASES = [
    pytest.param(cls, row, id=f"{SPEAKS_FOR.get(cls, cls).name}-{row.option}-{i}")
    for cls, rows in ROWS.items()
    for i, row in enumerate(rows)
]


@pytest.mark.parametrize("cls, row", CASES)
def test_an_option_changes_what_it_says_and_nothing_else(cls, row):
    cls = SPEAKS_FOR.get(cls, cls)
    a, b = (outcome(cls(**options), row.family) for options in row[1:3])
    found = changed(a.tensors(), b.tensors())
    if row.everywhere:
        present = {key for o in (a, b) for key in o.tensors()}
        assert found == {key for key in present if key[1] in row.affected}
    else:
        assert found and {module for _, module in found} <= set(row.affected)
    row.moves(a, b)


@pytest.mark.parametrize("name", [name for name in method_names() if not issubclass(method_class(name), OTHERS)])
def test_every_option_has_a_row(name):
    cls = method_class(name)
    rows = next(rows for base, rows in ROWS.items() if issubclass(cls, base))
    # tests/methods/test_targets.py, test_rankfold.py
    elsewhere = {"target", "allocation.other_texts"} | ELSEWHERE.get(name, set())
    known = {row.option for row in rows} | elsewhere
    assert {field.name for field in fields(cls)} <= known
    for taken, table in ((cls.allocations, ALLOCATIONS), (cls.budgets, BUDGETS)):
        parts = [part for part in table.values() if issubclass(part, taken)]
        assert {f"{part.kind}.{field.name}" for part in parts for field in fields(part)} <= known


def test_a_stricter_condition_limit_refuses():
    with pytest.raises(NumericsError, match="condition number"):
        rankfold.compress(
            opened("llama"), method=LatentLLM(**LATENT, condition_limit=1.0), calibration=tokens(32), mode="one-pass"
        )


@pytest.mark.parametrize("method", [MoDeGPT(**SMALL), LatentLLM(**LATENT)], ids=["modegpt", "latentllm"])
def test_the_mode_changes_every_block_but_the_first(method):
    models = [
        rankfold.compress(opened("llama"), method=method, calibration=tokens(32), mode=mode).model
        for mode in ("sequential", "one-pass")
    ]
    first, second = (Outcome(None, model, {}, None, unit_of) for model in models)
    before, after = first.tensors(), second.tensors()
    touched = {
        key
        # Moments of one pass are rounded to fp32, so the first block is not the same bits.
        for key, tensors in before.items()
        if not all(torch.allclose(t, after[key][name], rtol=1e-3, atol=1e-3) for name, t in tensors.items())
    }
    assert {block for block, _ in touched} == {1, 2} and None not in {module for _, module in touched}
