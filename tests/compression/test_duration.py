"""The time of a plan: forwards of one block and linear algebra that is counted, times rates of this device."""

import math
from collections import Counter

import pytest
import torch

import rankfold
from families import ANY_MODEL, opened, some_ids, tokens
from rankfold.allocation import Measured
from rankfold.calibration import backward
from rankfold.compression import duration, kl_divergence, rates
from rankfold.compression.budget import rank_options
from rankfold.compression.duration import estimated_seconds, timed
from rankfold.compression.importance import DenseMeasures, of_dense
from rankfold.compression.kl_divergence import least_rank
from rankfold.compression.plan import allocate_ranks, build_plan
from rankfold.data.probes import KINDS, Probes
from rankfold.errors import OptionError
from rankfold.linalg import nystrom, residual_correction
from rankfold.methods import make_method
from rankfold.methods.work import CORRECTION_RIDGES, Work, multiplying, of_trial, times

SPARSITY = dict.fromkeys(("wanda", "sparsegpt", "pruner-zero", "magnitude"), 0.5)
RATES = duration.Rates(read=100.0, forward=1.0, stages=10.0, dense=0.0, alone=3.0, head=0.5)
BLOCKS, TOKENS, HELD_OUT = 3, 16 * 32, 2 * 32


@pytest.fixture
def plain_rates(monkeypatch):
    """Rates of a machine on which everything is easy to add up, and free linear algebra."""
    monkeypatch.setattr(duration, "_measured_rates", lambda *_: RATES)
    monkeypatch.setattr(duration, "seconds_for", lambda work, device: 0.0)
    monkeypatch.setattr(duration, "most_tokens", lambda source: 1000)


def planned(method):
    source, calibration = opened("llama"), tokens()
    wanted = of_dense(source, method)
    moments = rankfold.calibrate(source, calibration, statistics=wanted) if wanted else None
    ranks = rank_options(source, method)
    allocated = allocate_ranks(
        ranks, method, method.allocation.measure(DenseMeasures(source, method, ranks, moments, calibration))
    )
    return source, build_plan(source, method, allocated, {}, calibration.describe()), calibration.describe()


def test_blocks_take_what_one_block_takes_for_all_blocks_and_tokens(plain_rates):
    source, plan, calibration = planned(rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2))
    assert estimated_seconds(plan, source, calibration, "sequential") == {
        "reading and writing": 3 * BLOCKS * 100,
        "blocks": BLOCKS * ((TOKENS + HELD_OUT) * 10 + HELD_OUT) + 2 * HELD_OUT * 0.5,
        "linear algebra": 0.0,
        "probe texts": 2 * 1000 * (BLOCKS + 0.5),
        "search": 0.0,
    }
    whole = timed(plan, source, calibration, "sequential")
    assert whole.to_dict() == plan.to_dict() | {"seconds": whole.seconds} and whole.seconds > 3 * BLOCKS * 100


@pytest.mark.parametrize(("texts", "rows"), [(0.0, 2), (0.5, 2 + 6)])  # held-out samples, and a probe text of each kind
def test_a_measured_allocation_carries_every_trial_to_the_end(texts, rows, plain_rates, monkeypatch):
    six = Probes(some_ids(6, 32, seed=3), (32,) * 6, KINDS, "plain text")
    monkeypatch.setattr(kl_divergence, "read_probes", lambda _: six)
    allocation = Measured(other_texts=texts)
    source, plan, calibration = planned(rankfold.Rankfold(sparsity=0.3, rank_multiple=2, allocation=allocation))
    found = estimated_seconds(plan, source, calibration, "sequential")["measured allocation"]
    compared, trials = rows * 32, BLOCKS * 3
    passes = BLOCKS + trials + 3 * (1 + 2)  # of the dense stream; of each trial its own block, and those after it
    assert found == BLOCKS * TOKENS * 3 + compared * passes + BLOCKS * 100 + compared * (trials + 1) * 0.5


def test_a_backward_pass_takes_its_windows(plain_rates, monkeypatch):
    monkeypatch.setattr(backward, "TOKENS", 4 * 32)
    source, plan, calibration = planned(rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2, output_weighting="fisher"))
    found = estimated_seconds(plan, source, calibration, "one-pass")["gradients"]
    layers = [m for m in source.block(0).module.modules() if isinstance(m, torch.nn.Linear)]
    sums = 2 * source.config.hidden_size**2 / sum(layer.weight.numel() for layer in layers)  # of two layers' outputs
    assert found == pytest.approx(4 * 32 * ((backward.PASSES + sums) * BLOCKS + duration.HEAD_PASSES * 0.5))


@pytest.mark.parametrize(("sparsity", "left"), [(0.3, [BLOCKS]), (0.6, [BLOCKS, BLOCKS - 1])])
def test_a_search_for_blocks_predicts_the_text_without_each(plain_rates, sparsity, left):
    source, plan, calibration = planned(make_method("sleb", sparsity=sparsity))
    found = estimated_seconds(plan, source, calibration, "sequential")["search"]
    assert found == TOKENS * sum(blocks**2 / 2 + blocks * 0.5 for blocks in left)


@pytest.mark.parametrize(
    ("name", "experts"),
    [("modegpt", {"experts"}), ("latentllm", {"experts_up", "experts_down"}), ("reap", {"expert_count"})],
)
def test_accelerators_share_the_linear_algebra_of_experts_and_no_other(name, experts):
    method = make_method(name, sparsity=0.3, **({} if name == "reap" else {"rank_multiple": 2}))
    source = opened("mixtral")
    plan = rankfold.plan(source, method=method)
    one, four = (duration._work(source, method, plan, count) for count in (1, 4))
    theirs = Work()
    for index in range(BLOCKS):
        ranks = {module: rank for module, rank in plan.ranks(index).items() if module in experts}
        theirs += method.work(source.meta_block(index), ranks)
    assert theirs and times(theirs, 3 / 4) == pytest.approx(one - four)


def test_the_time_of_an_unknown_mode_is_refused():
    source, plan, calibration = planned(rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2))
    with pytest.raises(OptionError, match="mode must be sequential or one-pass, got 'turbo'"):
        timed(plan, source, calibration, "turbo")


@pytest.mark.parametrize("name", ANY_MODEL)
def test_every_method_has_an_estimate(name):
    """Of real rates; and none that decomposes anything has work for free."""
    steps = {} if name in (*SPARSITY, "shortgpt", "sleb") else {"rank_multiple": 2}
    method = make_method(name, sparsity=SPARSITY.get(name, 0.4), **steps)
    source, plan, calibration = planned(method)
    found = estimated_seconds(plan, source, calibration, method.modes[0])
    assert all(value >= 0 for value in found.values()) and found["blocks"] > 0
    assert (found["linear algebra"] > 0) == (name not in ("shortgpt", "sleb"))
    assert sum(found.values()) < 60


@pytest.fixture
def calls(monkeypatch):
    """(routine, size) -> how often it really ran."""
    found = Counter()

    def watch(owner, name: str, routine: str, count) -> None:
        run = getattr(owner, name)

        def watched(A, *args, **options):
            found[routine, A.shape[-1]] += count(A, *args, **options)
            return run(A, *args, **options)

        monkeypatch.setattr(owner, name, watched)

    def removed(W, P, *, rank):
        F, D = W.shape[1], W.shape[0]
        taken, half = ((rank, D), (F // 2, F))
        operations = [sum(n**2 + 2 * width * n for n in range(F, least, -1)) for least, width in (taken, half)]
        return operations[0] / operations[1]

    watch(nystrom, "spd_inverse", "inverse", lambda *_, **__: 1)
    watch(nystrom, "elimination", "elimination", removed)
    monkeypatch.setattr(nystrom, "eliminate_units", lambda W, P, rank: _units(nystrom.elimination(W, P, rank=rank), W))
    watch(torch.linalg, "cholesky_ex", "cholesky", lambda *_, **__: 1)
    return found


def _units(found, W):
    alive = torch.ones(W.shape[1], dtype=torch.bool)
    alive[found.order] = False
    return alive.nonzero()[:, 0]


def counted(work: Work, *routines: str) -> dict:
    return {key: pytest.approx(value) for key, value in work.items() if key[0] in routines and value}


@pytest.mark.parametrize("cls", [rankfold.MoDeGPT, rankfold.Rankfold])
def test_what_a_method_declares_is_what_it_does(calls, cls):
    """Inverses and eliminations of a compression, at their sizes."""
    source, calibration = opened("llama"), tokens()
    method = cls(sparsity=0.3, rank_multiple=2, allocation="uniform")
    plan = rankfold.plan(source, method=method)
    calls.clear()
    rankfold.compress(source, method=method, calibration=calibration)
    declared = sum((method.work(source.meta_block(i), plan.ranks(i)) for i in range(BLOCKS)), Work())
    done = {key: value for key, value in calls.items() if key[0] in ("inverse", "elimination")}
    assert done == counted(declared, "inverse", "elimination") and done


def test_a_curve_declares_what_it_does(calls):
    source, calibration = opened("llama"), tokens()
    method = rankfold.Rankfold(sparsity=0.3, rank_multiple=2)
    moments = rankfold.calibrate(
        source, calibration, statistics=method.alone(source.meta_block(0)).statistics(source.meta_block(0))
    )
    view = source.block(0)
    (unit,) = (unit for unit in method.prunable_modules(view) if unit.module == "mlp")
    calls.clear()
    least = least_rank(unit, 0.3)
    method.alone(view).curve(view, moments[0], unit, least)
    done = {(f"compared {name}", F): n for (name, F), n in calls.items() if name in ("inverse", "elimination")}
    declared = method.work_of_curve(view, unit, least)
    assert done == counted(declared, "compared inverse", "compared elimination") and done


def test_a_correction_tries_so_many_ridges():
    assert len(residual_correction.RIDGES) == CORRECTION_RIDGES


def test_work_adds_up():
    one = multiplying(1024, 1024, 1024) + Work({("eigh", 64): 2.0})
    assert times(one, 3) == {("product", 1024): 3.0, ("eigh", 64): 6.0}
    assert of_trial(Work({("eigh", 64): 2.0})) == {("eigh", 64): 2.0}


@pytest.fixture
def measured(monkeypatch):
    """What is measured, each of which takes two seconds."""
    found = []

    def measure(routine, size, device, threads):
        found.append((routine, size))
        return 2.0

    monkeypatch.setattr(rates, "_measured", measure)
    return found


def test_large_matrices_take_longer_by_the_cube(measured):
    work = Work({("eigh", 2 * rates.LARGEST): 3.0, ("svd", 10): 5.0})
    assert rates.seconds_for(work, torch.device("cpu")) == 3 * 2 * 8 + 5 * 2
    assert measured == [("eigh", rates.LARGEST), ("svd", 10)]


def test_sizes_near_each_other_share_a_measurement(measured):
    """Ranks of a model are many sizes; its widths are few, and measured as they are."""
    seconds = rates.seconds_for(Work({("solve", rank): 1.0 for rank in range(520, 1025, 8)}), torch.device("cpu"))
    assert sorted(set(measured)) == [("solve", size) for size in range(576, 1025, 64)]
    assert seconds == pytest.approx(sum(2 * (rank / (64 * math.ceil(rank / 64))) ** 3 for rank in range(520, 1025, 8)))
    measured.clear()
    widths = (48, 64, 128, 576, 768, 896, 1024, 1536)
    rates.seconds_for(Work({("eigh", width): 1.0 for width in widths}), torch.device("cpu"))
    assert tuple(size for _, size in measured) == widths


@pytest.mark.parametrize("routine", rates.ROUTINES)
def test_every_routine_has_a_rate(routine):
    assert 0 < rates.seconds_for(Work({(routine, 48): 1.0}), torch.device("cpu")) < 5
