"""Integer ranks: exact budgets, multiples, excluded blocks, and messages that tell what can be reached."""

import itertools
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold._utils.present import present
from rankfold.allocation import Influence, ModuleInfluence
from rankfold.allocation.ranks import allocate, removable
from rankfold.allocation.sparsities import _spend, round_sparsities
from rankfold.errors import OptionError
from rankfold.methods import MoDeGPT, PrunableModule

INFLUENCE = st.sampled_from(["uniform", "influence", "influence-modules"])


def unit(block: int, module: str, full: int, per_rank: int, multiple: int = 8) -> PrunableModule:
    ranks = (*range(multiple, full, multiple), full)
    return PrunableModule(block, module, ranks, tuple(r * per_rank for r in ranks))


def model(
    blocks: int = 4, *, multiple: int = 8, hidden: int = 96, head: int = 32, width: int = 32
) -> list[PrunableModule]:
    """Units of a small Llama: 3 matrices in the MLP, 4 heads and 2 key/value heads."""
    return [
        u
        for b in range(blocks)
        for u in (
            unit(b, "mlp", hidden, 3 * width, multiple),
            unit(b, "qk", head, 6 * width, multiple),
            unit(b, "vo", head, 6 * width, multiple),
        )
    ]


def scores_of(units, seed: int = 0) -> dict:
    draw = random.Random(seed)
    return {b: tuple(draw.random() for _ in range(3)) for b in sorted({u.block for u in units})}


def dense(units) -> int:
    return sum(u.dense for u in units)


def removed(units, ranks) -> int:
    return sum(u.dense - u.size(ranks[u.block, u.module]) for u in units)


def next_steps(units, ranks) -> list[int]:
    """Weights that each unit below its full rank would take back with one step."""
    places = [(u, u.ranks.index(ranks[u.block, u.module])) for u in units]
    return [u.sizes[n + 1] - u.sizes[n] for u, n in places if n + 1 < len(u.sizes)]


@st.composite
def unit_sets(draw):
    """Any units: modules missing in some blocks, odd widths, a last step that is shorter than the others."""
    units = []
    for block in range(draw(st.integers(1, 4))):
        for module in draw(st.sets(st.sampled_from(["mlp", "qk", "vo"]), min_size=1)):
            full = draw(st.integers(1, 30))
            units.append(unit(block, module, full, draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 8]))))
    return sorted(units, key=lambda u: u.block)


@settings(max_examples=100, deadline=None)
@given(unit_sets(), st.floats(0, 1), INFLUENCE, st.integers(0, 99))
def test_at_least_the_request_goes_and_less_than_one_step_more(units, filled, allocation, seed):
    counted = dense(units)
    sparsity = min(filled * removable(units) / counted, 0.999)
    ranks, _ = allocate(units, MoDeGPT(sparsity=sparsity, allocation=allocation), counted, scores_of(units, seed))
    gone, wanted = removed(units, ranks), math.ceil(sparsity * counted - 1e-9)
    assert gone >= wanted
    assert all(gone - wanted < step for step in next_steps(units, ranks)) or gone == wanted == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.floats(0.0, 0.8), st.sampled_from([1, 4, 8, 16]), INFLUENCE, st.integers(0, 99))
def test_ranks_are_multiples_or_full(blocks, sparsity, multiple, allocation, seed):
    units = model(blocks, multiple=multiple)
    if sparsity * dense(units) > removable(units):
        return
    ranks, _ = allocate(units, MoDeGPT(sparsity=sparsity, allocation=allocation), dense(units), scores_of(units, seed))
    assert ranks.keys() == {(u.block, u.module) for u in units}
    for u in units:
        rank = ranks[u.block, u.module]
        assert rank in u.ranks and (rank % multiple == 0 or rank == u.ranks[-1])


def test_a_last_step_that_is_shorter_than_the_others_is_used():
    """A head of 20 in multiples of 8 ends in a step of 4, which fits where a step of the MLP no longer does."""
    units = [unit(0, "mlp", 48, 96), unit(0, "qk", 20, 96), unit(0, "vo", 20, 96)]
    for wanted in range(0, removable(units) + 1, 96):
        ranks, _ = allocate(units, MoDeGPT(sparsity=wanted / dense(units)), dense(units))
        surplus = removed(units, ranks) - wanted
        assert surplus >= 0 and all(surplus < step for step in next_steps(units, ranks))


def total_shares(units, sparsity: float) -> float:
    return sum((1 - sparsity) * u.dense for u in units)


@pytest.mark.parametrize("sparsity", [0.2, 0.3, 0.45])
@pytest.mark.parametrize("order", [1, -1])
def test_what_one_block_cannot_use_the_next_one_gets(sparsity, order):
    """Coarse steps: up to every block, what stays is within a step of the blocks' share so far; none is favoured."""
    units = [unit(b, "mlp", 100, 3, 20) for b in range(12)]
    ranks, _ = allocate(units[::order], MoDeGPT(sparsity=sparsity), dense(units))
    for n in range(1, 13):
        kept = sum(u.size(ranks[u.block, u.module]) for u in units[:n])
        assert abs(kept - total_shares(units[:n], sparsity)) < 20 * 3


def test_what_is_left_in_the_end_goes_to_the_unit_furthest_below_its_share():
    """Shares 85, 85 and 51: the first gives its remainder to the second; steps of the third are too long for it."""
    units = [unit(2, "mlp", 60, 1, 20), unit(1, "mlp", 100, 1, 10), unit(0, "mlp", 100, 1, 10)]
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.15), dense(units))
    assert ranks == {(0, "mlp"): 90, (1, "mlp"): 90, (2, "mlp"): 40}


def test_furthest_is_measured_in_parts_of_the_unit():
    """Shares 28, 70 and 70: the last leaves enough for one step of 20, and 8 of 40 lack more than 10 of 100 do."""
    units = [unit(0, "mlp", 40, 1, 20), unit(1, "mlp", 100, 1, 20), unit(2, "mlp", 100, 1, 50)]
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.3), dense(units))
    assert ranks == {(0, "mlp"): 40, (1, "mlp"): 60, (2, "mlp"): 50}


def test_where_a_unit_can_go_no_lower_the_others_do():
    """Heads are rounded up, so MLPs get less than their share; the second one keeps at least 50, and the first pays."""
    units = [unit(b, "qk", 60, 1, 20) for b in (0, 1)] + [unit(0, "mlp", 60, 1, 10), unit(1, "mlp", 60, 1, 50)]
    ranks, _ = allocate(units, MoDeGPT(sparsity=97 / 240), dense(units))
    assert ranks == {(0, "qk"): 40, (1, "qk"): 40, (0, "mlp"): 10, (1, "mlp"): 50}


def test_the_module_with_the_finest_steps_makes_up_for_the_others():
    """Heads in steps of a quarter are rounded to the nearest; what they gain or lose is the MLP's, in every block."""
    for sparsity, heads in ((0.2, 24), (0.35, 24), (0.4, 16)):
        units = model(6, hidden=960)
        ranks, _ = allocate(units, MoDeGPT(sparsity=sparsity), dense(units))
        assert {ranks[b, m] for b in range(6) for m in ("qk", "vo")} == {heads}
        rest = total_shares(units, sparsity) - sum(u.size(heads) for u in units if u.module != "mlp")
        for n in range(1, 7):
            gap = rest * n / 6 - sum(ranks[b, "mlp"] for b in range(n)) * 96
            assert -1e-6 < gap < 8 * 96 + 1e-6


@pytest.mark.parametrize(("wanted", "budget", "found"), [([11, 20], 30, [1, 2]), ([20, 11], 30, [2, 1])])
def test_what_is_furthest_above_its_share_goes_down_first(wanted, budget, found):
    level = [2, 2]
    _spend([PrunableModule(b, "mlp", (0, 1, 2), (0, 10, 20)) for b in range(2)], wanted, level, [0, 1], budget)
    assert level == found


def test_a_module_without_a_choice_is_not_the_one_with_the_finest_steps():
    units = [u for u in model(4, hidden=100, multiple=1) if u.module == "mlp"]
    units += [unit(b, "qk", 64, 100) for b in range(4)]
    stuck = [PrunableModule(b, "vo", (64,), (6400,)) for b in range(4)]
    budget = sum(round(0.8 * u.dense) for u in units)
    expected = round_sparsities(units, [0.2] * len(units), budget)
    found = round_sparsities([*units, *stuck], [0.2] * len(units) + [0.0] * 4, budget + dense(stuck))
    assert {expected[b, "qk"] for b in range(4)} == {48} and expected == {key: found[key] for key in expected}


def test_protected_blocks_and_weights_elsewhere_raise_the_sparsity_of_all_modules_alike():
    """0.2 of a model with as much outside of the blocks, one block of four protected: 0.2 * 2 / (3 / 4) of the rest."""
    units = model(4, multiple=1, hidden=960)
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.2, exclude_blocks=(0,)), 2 * dense(units))
    shares = {ranks[b, m] / u.ranks[-1] for u in units[3:] for b, m in [(u.block, u.module)]}
    assert all(share == pytest.approx(1 - 0.2 * 2 * 4 / 3, abs=0.02) for share in shares)


def test_zero_sparsity_keeps_every_module_dense():
    units = model()
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.0), dense(units))
    assert all(ranks[u.block, u.module] == u.ranks[-1] for u in units)


def test_the_largest_sparsity_there_is_can_be_reached():
    units = model()
    ranks, _ = allocate(units, MoDeGPT(sparsity=removable(units) / dense(units)), dense(units))
    assert all(ranks[u.block, u.module] == u.ranks[0] for u in units)
    assert removable(units) == removed(units, ranks)


@pytest.mark.parametrize("sparsity", [0.1, 0.25, 0.3, 0.5])
@pytest.mark.parametrize("multiple", [1, 8])
def test_uniform_blocks_are_alike(sparsity, multiple):
    """Every module within one step of its share; the MLP, with the finer steps, makes up for the rounding of heads."""
    units = model(6, multiple=multiple, hidden=304)
    ranks, facts = allocate(units, MoDeGPT(sparsity=sparsity), dense(units))
    for module, full in [("mlp", 304), ("qk", 32), ("vo", 32)]:
        mine = [ranks[b, module] for b in range(6)]
        assert max(mine) - min(mine) <= multiple
        rounding_of_heads = 2 * multiple / 2 * 192 / 96 if module == "mlp" else 0
        assert all(abs(r - (1 - sparsity) * full) <= multiple + rounding_of_heads for r in mine)
    assert facts == {"allocation": "uniform"}


def test_uniform_gives_equal_modules_equal_ranks():
    units = model(4)
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.25), dense(units))
    assert set(ranks.items()) == {
        ((b, m), {"mlp": 72, "qk": 24, "vo": 24}[m]) for b in range(4) for m in ("mlp", "qk", "vo")
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.floats(0.05, 0.7), st.integers(0, 10**4))
def test_less_influential_blocks_are_sparser(blocks, sparsity, seed):
    """Up to one step of rounding in each of a block's modules."""
    units = [unit(b, "mlp", 400, 7, 1) for b in range(blocks)]
    scores = scores_of(units, seed)
    ranks, facts = allocate(units, MoDeGPT(sparsity=sparsity, allocation="influence"), dense(units), scores)
    order = sorted(range(blocks), key=lambda b: scores[b][0])
    kept = [ranks[b, "mlp"] for b in order]
    assert all(a <= b + 1 for a, b in itertools.pairwise(kept))
    assert facts["scores"] == {str(b): scores[b] for b in range(blocks)}


def test_the_papers_rule_for_the_temperature_leaves_a_fifth_of_the_least_influential_block():
    units = [unit(b, "mlp", 1000, 10, 1) for b in range(8)]
    scores = {b: (0.1 * b,) * 3 for b in range(8)}
    ranks, facts = allocate(units, MoDeGPT(sparsity=0.3, allocation="influence"), dense(units), scores)
    assert abs(ranks[0, "mlp"] - 200) <= 1 and facts["temperature"] > 0
    ranks, facts = allocate(units, MoDeGPT(sparsity=0.3, allocation=Influence(temperature=1e6)), dense(units), scores)
    assert set(ranks.values()) <= {699, 700, 701} and facts["temperature"] == 1e6


def test_each_half_of_a_block_follows_its_own_influence():
    units = model(3, multiple=1)
    scores = {0: (0.5, 0.1, 0.9), 1: (0.5, 0.9, 0.1), 2: (0.5, 0.5, 0.5)}  # block, attention, mlp
    method = MoDeGPT(sparsity=0.3, allocation=ModuleInfluence(temperature=1.0))
    ranks, _ = allocate(units, method, dense(units), scores)
    assert ranks[0, "qk"] < ranks[2, "qk"] < ranks[1, "qk"]
    assert ranks[1, "mlp"] < ranks[2, "mlp"] < ranks[0, "mlp"]


def test_equation_42_weighs_the_halves_by_their_parameters():
    """An MLP with two thirds of the weights counts twice: where the raw scores agree, it loses less."""
    units = [
        u for b in range(2) for u in (unit(b, "mlp", 200, 20, 1), unit(b, "qk", 50, 20, 1), unit(b, "vo", 50, 20, 1))
    ]
    method = MoDeGPT(sparsity=0.3, allocation=ModuleInfluence(temperature=0.5))
    ranks, _ = allocate(units, method, dense(units), dict.fromkeys(range(2), (0.4, 0.4, 0.4)))
    kept_mlp, kept_qk = ranks[0, "mlp"] / 200, ranks[0, "qk"] / 50
    assert kept_mlp > kept_qk
    # phi = c exp(-w s / eps), with w = 2 and 1
    assert (1 - kept_mlp) / (1 - kept_qk) == pytest.approx(math.exp(-0.4 / 0.5), rel=0.05)


@pytest.mark.parametrize("excluded", [(0,), (-1,), (0, -1), (1, 3)])
def test_protected_blocks_stay_dense_and_the_others_make_up_for_them(excluded):
    units = model(4)
    ranks, _ = allocate(units, MoDeGPT(sparsity=0.3, exclude_blocks=excluded), dense(units))
    inside = {b % 4 for b in excluded}
    for u in units:
        assert (ranks[u.block, u.module] == u.ranks[-1]) or u.block not in inside
    assert removed(units, ranks) >= 0.3 * dense(units)


@pytest.mark.parametrize("block", [4, -5, 99])
def test_a_protected_block_that_is_not_there_is_refused(block):
    units = model(4)
    with pytest.raises(OptionError, match=rf"excluded block {block} is not in the model, which has blocks 0 to 3"):
        allocate(units, MoDeGPT(sparsity=0.3, exclude_blocks=(block,)), dense(units))


def test_counting_the_whole_model_takes_more_from_the_blocks():
    units = model(4)
    of_blocks, _ = allocate(units, MoDeGPT(sparsity=0.2), dense(units))
    of_model, _ = allocate(units, MoDeGPT(sparsity=0.2), 2 * dense(units))
    assert removed(units, of_model) >= 0.4 * dense(units) > removed(units, of_blocks)


@pytest.mark.parametrize("allocation", ["uniform", "influence"])
@pytest.mark.parametrize("own", [{"mlp": 0.5}, {"mlp": 0.25, "vo": 0.5}, {"qk": 0.0, "vo": 0.25}])
def test_own_sparsities_are_met_module_by_module(own, allocation):
    units = model(4)
    ranks, _ = allocate(units, MoDeGPT(modules=own, allocation=allocation), dense(units), scores_of(units))
    for module in ("mlp", "qk", "vo"):
        mine = [u for u in units if u.module == module]
        gone, wanted = removed(mine, ranks), own.get(module, 0.0) * dense(mine)
        assert wanted <= gone < wanted + mine[0].sizes[0] + 1


def temperatures(facts) -> set[float]:
    """All temperatures in a record, however deep."""
    if not isinstance(facts, dict):
        return set()
    return {v for k, v in facts.items() if k == "temperature"}.union(*(temperatures(v) for v in facts.values()))


def test_own_sparsities_record_the_temperature_of_every_module():
    units, scores = model(4), scores_of(model(4))

    def recorded(own):
        return temperatures(allocate(units, MoDeGPT(modules=own, allocation="influence"), dense(units), scores)[1])

    assert len(recorded({"mlp": 0.3})) == len(recorded({"vo": 0.5})) == 1
    assert recorded({"mlp": 0.3, "vo": 0.5}) == recorded({"mlp": 0.3}) | recorded({"vo": 0.5})


class OneRank(MoDeGPT):
    """All blocks share a rank."""

    one_rank = True


@pytest.mark.parametrize("sparsity", [0.05, 0.3, 0.61, 0.8])
def test_one_rank_is_the_largest_that_all_units_may_take_and_with_which_enough_goes(sparsity):
    units = [unit(b, "mlp", 96, 3 + b) for b in range(3)]
    units[1] = PrunableModule(1, "mlp", (16, 24, 96), (64, 96, 384))
    ranks, facts = allocate(units, OneRank(sparsity=sparsity), dense(units))
    (rank,) = set(ranks.values())
    enough = [r for r in (16, 24, 96) if sum(u.dense - u.size(r) for u in units) >= sparsity * dense(units)]
    assert rank == max(enough)
    assert facts == {"allocation": "uniform", "rank": rank, "of": 96, "nominal_sparsity": 1 - rank / 96}


def test_one_rank_that_not_all_units_may_take_does_not_count():
    units = [PrunableModule(0, "mlp", (8, 24, 96), (8, 24, 96)), PrunableModule(1, "mlp", (16, 24, 96), (16, 24, 96))]
    with pytest.raises(OptionError, match=r"can lose at most 144 of the 154 .* sparsity 0\.7500"):
        allocate(units, OneRank(sparsity=0.8), dense(units))


@pytest.mark.parametrize("sparsity", [0.05, 0.3, 0.61])
def test_modules_of_several_widths_keep_the_same_share(sparsity):
    """Dense blocks and experts have fields of their own in a config; those of one width have one rank."""
    wide = [PrunableModule(b, "mlp", (0, 32, 64, 80, 96), (0, 320, 640, 800, 960)) for b in range(2)]
    narrow = [PrunableModule(b, "experts", tuple(range(0, 25, 8)), tuple(range(0, 250, 80))) for b in range(2, 5)]
    units = [*wide, *narrow]
    ranks, _ = allocate(units, OneRank(sparsity=sparsity), dense(units))
    ((of_wide,), (of_narrow,)) = ({ranks[u.key] for u in group} for group in (wide, narrow))
    pairs = [(w, max(n for n in narrow[0].ranks if n / 24 <= w / 96)) for w in wide[0].ranks]
    pairs += [(max(w for w in wide[0].ranks if w / 96 <= n / 24), n) for n in narrow[0].ranks]
    amounts = {pair: removed(units, {u.key: pair[u.module == "experts"] for u in units}) for pair in pairs}
    assert removed(units, ranks) == min(a for a in amounts.values() if a >= sparsity * dense(units))
    assert amounts[of_wide, of_narrow] == removed(units, ranks)


@pytest.mark.parametrize("cost", [-300, 700])
def test_fixed_ranks_are_taken_and_the_others_lose_the_rest(cost):
    inner = model()
    fixed = [PrunableModule(b, "stream", (24, 32), (1000 - cost, 1000), fixed=True) for b in range(4)]
    units = [*fixed, *inner]
    ranks, facts = allocate(units, MoDeGPT(sparsity=0.3), dense(units))
    assert all(ranks[b, "stream"] == 24 for b in range(4)) and facts["nominal_sparsity"] == 0.25
    gone = removed(units, ranks)
    assert gone == removed(inner, ranks) + 4 * cost
    assert 0 <= gone - 0.3 * dense(units) < max(next_steps(inner, ranks))
    assert allocate(units, MoDeGPT(sparsity=0.0), dense(units))[0] == {(u.block, u.module): u.ranks[-1] for u in units}


def test_unreachable_sparsity_says_what_can_be_reached():
    units = model(2)  # each unit keeps at least 8 of 96 or 8 of 32
    most = removable(units)
    message = (
        rf"sparsity 0\.9 cannot be reached: .* at most {most:,} of the .* sparsity {most / dense(units):.4f}; lower"
    )
    with pytest.raises(OptionError, match=message):
        allocate(units, MoDeGPT(sparsity=0.9), dense(units))
    allocate(units, MoDeGPT(sparsity=math.floor(most / dense(units) * 1e4) / 1e4), dense(units))


def test_unreachable_sparsity_of_the_model_is_counted_on_the_model():
    units = model(2)
    reach = removable(units) / (3 * dense(units))
    with pytest.raises(OptionError, match=rf"sparsity 0\.5 cannot be reached.* sparsity {reach:.4f};"):
        allocate(units, MoDeGPT(sparsity=0.5, scope="model"), 3 * dense(units))


def test_what_is_said_to_be_reachable_can_be_asked_for():
    units = model(2)
    for counted in range(dense(units), dense(units) + 300, 7):
        with pytest.raises(OptionError) as error:
            allocate(units, MoDeGPT(sparsity=0.95, scope="model"), counted)
        reach = present(re.search(r", sparsity (0\.\d{4});", str(error.value)))[1]
        allocate(units, MoDeGPT(sparsity=float(reach), scope="model"), counted)


def test_unreachable_own_sparsity_names_the_module():
    with pytest.raises(OptionError, match=r"sparsity 0\.95 of module mlp cannot be reached.* sparsity 0\.9166; lower"):
        allocate(model(2), MoDeGPT(modules={"mlp": 0.95}), dense(model(2)))


def test_what_can_be_reached_of_a_module_counts_its_protected_blocks():
    """Half of the blocks are protected; 11/12 of the others is 0.4583 of the module, though 0.9167 of the others."""
    units = model(2)
    with pytest.raises(OptionError, match=r"sparsity 0\.5 of module mlp cannot be reached.* sparsity 0\.4583; lower"):
        allocate(units, MoDeGPT(modules={"mlp": 0.5}, exclude_blocks=(0,)), dense(units))


def test_everything_protected_says_that_nothing_can_be_reached():
    with pytest.raises(OptionError, match=r"cannot be reached.* sparsity 0\.0000"):
        allocate(model(2), MoDeGPT(sparsity=0.1, exclude_blocks=(0, 1)), dense(model(2)))


def test_influence_without_scores_is_refused():
    with pytest.raises(OptionError, match="allocation 'influence' needs scores of the dense model, and there are none"):
        allocate(model(2), MoDeGPT(sparsity=0.3, allocation="influence"), dense(model(2)))


@settings(max_examples=20, deadline=None)
@given(unit_sets(), st.floats(0.1, 0.9), INFLUENCE)
def test_result_is_deterministic(units, filled, allocation):
    method = MoDeGPT(sparsity=filled * removable(units) / dense(units), allocation=allocation)
    results = [allocate(units, method, dense(units), scores_of(units)) for _ in range(2)]
    assert results[0] == results[1]
