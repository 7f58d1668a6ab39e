"""Elimination against naive greedy search with a full refit at every step, and brute force over subsets."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modegpt_problems import MLP, mlp, query_key
from problems import KINDS

from rankfold.linalg.column_row import eliminate_pairs, pair_up, unit_scores
from rankfold.linalg.elimination import eliminate_groups, eliminate_units, elimination
from rankfold.linalg.nystrom import nystrom

F64 = torch.float64


def damped(C, ridge=1e-4):
    return C + ridge * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)


def loss(W, C, keep) -> float:
    """Squared error of the best weights on the kept units."""
    drop = [i for i in range(len(C)) if i not in keep]
    schur = C[drop][:, drop]
    if keep:
        schur = schur - C[drop][:, keep] @ torch.linalg.solve(C[keep][:, keep], C[keep][:, drop])
    return (W[:, drop] @ schur @ W[:, drop].T).trace().item()


def naive(W, C, rank) -> list[int]:
    """One unit at a time, each time refitting the rest for every candidate."""
    keep = list(range(len(C)))
    while len(keep) > rank:
        keep = min(([i for i in keep if i != j] for j in keep), key=lambda rest: loss(W, C, rest))
    return keep


def relative(p: MLP, keep) -> float:
    """Output error of the least squares refit on the raw activations."""
    Y = p.a @ p.W.T
    gap = Y - p.a[:, keep] @ torch.linalg.lstsq(p.a[:, keep], Y, driver="gelsd").solution
    return (gap.norm() / Y.norm()).item()


def massive(groups: int = 3, quiet: int = 18, tokens: int = 400, seed: int = 0) -> MLP:
    """What Qwen2.5 does: a few units fire together, a thousand times as loud as the rest, on the first token.

    Each is nearly a multiple of the others, so each of them alone could be spared, but not all.
    """
    p = mlp("gaussian", F=groups + quiet, tokens=tokens, seed=seed)
    a = p.a.clone()
    first = torch.arange(0, tokens, 50)
    a[:, :groups] *= 1e-3
    a[first, :groups] = 1e3 * torch.tensor([1.0, 0.7, 1.3], dtype=F64)[:groups] + a[first, :groups]
    return MLP(a, p.W)


@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_units_leave_in_the_order_of_naive_greedy_search(kind, rank):
    p = mlp(kind)
    C = damped(p.C)
    keep = eliminate_units(p.W.clone(), torch.linalg.inv(C), rank=rank).tolist()
    reference = naive(p.W, C, rank)
    assert keep == reference or loss(p.W, C, keep) == pytest.approx(loss(p.W, C, reference), rel=1e-6)


def test_many_units_at_once_lose_little_against_one_by_one():
    """200 units leave up to two at a time between updates of the whole; the loss is that of exact greedy search, a few
    thousandths more or less."""
    ratios = torch.tensor([_against_one_by_one(seed, rank=60 + 9 * seed) for seed in range(15)])
    assert ratios.mean() <= 1.003 and ratios.max() <= 1.03


def _against_one_by_one(seed: int, rank: int) -> float:
    p = mlp("gaussian", F=200, D=20, tokens=500, seed=seed)
    C = damped(p.C)
    W, P = p.W.clone(), torch.linalg.inv(C)
    keep = eliminate_units(W, P, rank=rank)
    alive, W, P = torch.ones(200, dtype=torch.bool), p.W.clone(), torch.linalg.inv(C)
    for _ in range(200 - rank):
        j = torch.where(alive, W.square().sum(0) / P.diagonal(), torch.inf).argmin()
        W, P, alive[j] = W - torch.outer(W[:, j], P[j] / P[j, j]), P - torch.outer(P[:, j], P[j] / P[j, j]), False
    reference = alive.nonzero()[:, 0]
    return float(loss(p.W, C, keep.tolist()) / loss(p.W, C, reference.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_a_massive_collinear_group_does_not_leave_together(seed):
    """Leverage scores take all of it and say the error is small where they are looked at one by one."""
    p = massive(seed=seed)
    ours = nystrom(p.W, p.C, rank=14, ridge=1e-8)
    paper = nystrom(p.W, p.C, rank=14, ridge=1e-8, selection="leverage")
    assert set(ours.keep.tolist()) & {0, 1, 2}
    assert not set(paper.keep.tolist()) & {0, 1, 2}
    assert relative(p, ours.keep) < 0.02 < 0.5 < relative(p, paper.keep)
    assert ours.relative_error == pytest.approx(relative(p, ours.keep), rel=0.05, abs=1e-4)


@pytest.mark.parametrize("rank", [1, 5, 10, 14])
def test_nothing_is_removed_twice_where_few_units_are_left(rank):
    """Units whose losses differ by orders of magnitude, of which the last ones depend on each other."""
    F, last, tied = 1536, 19, 3
    g = torch.Generator().manual_seed(last)
    C, W = torch.eye(F, dtype=F64), torch.zeros(8, F, dtype=F64)
    torch.randn(last - tied, last - tied, dtype=F64, generator=g)
    mixed = torch.randn(tied, last - tied, dtype=F64, generator=g) / (last - tied) ** 0.5
    rows = torch.cat([torch.eye(last - tied, dtype=F64), mixed])
    C[-last:, -last:] = rows @ rows.T
    W[:, -last:] = torch.randn(8, last, dtype=F64, generator=g)
    P = torch.linalg.inv(C + 1e-6 * torch.eye(F, dtype=F64))
    found = elimination(W, P, rank=rank)
    assert len(found.order) == len(set(found.order.tolist())) == F - rank
    assert min(found.losses) > -1e-9 and nystrom(W, C, rank=rank, ridge=1e-6).W_down.shape == (8, rank)


def test_units_that_nobody_reads_go_first():
    p = mlp("gaussian")
    p.W[:, [2, 7, 8]] = 0
    assert not {2, 7, 8} & set(nystrom(p.W, p.C, rank=9).keep.tolist())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 11))
def test_relabelling_the_units_relabels_the_choice(seed, rank):
    p = mlp("gaussian", seed=seed % 40)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    inverse = torch.linalg.inv(damped(p.C))
    a = eliminate_units(p.W.clone(), inverse.clone(), rank=rank)
    b = eliminate_units(p.W[:, order].clone(), inverse[order][:, order].clone(), rank=rank)
    assert a.tolist() == sorted(order[b].tolist())


@pytest.mark.parametrize("transposed", [False, True])
def test_the_weights_given_stay_as_they_are(transposed):
    """Also where they are a transposed view, as GPT-2's are."""
    p = mlp("gaussian")
    W = p.W.T.contiguous().T if transposed else p.W.clone()
    eliminate_units(W, torch.linalg.inv(damped(p.C)), rank=4)
    assert torch.equal(W, p.W)


def costs(seed: int, heads: int = 3, n: int = 8) -> torch.Tensor:
    """Costs of dropping groups as scores make them: sums over windows of products of Gram matrices."""
    p = query_key(N=n, H=heads, T=12, sequences=4, seed=seed)
    spread = p.K - p.K.mean(1, keepdim=True)
    return torch.einsum("shtn,shtm->shnm", p.Q, p.Q).mul(torch.einsum("stn,stm->snm", spread, spread)[:, None]).sum(0)


def of(M, drop) -> float:
    drop = torch.as_tensor(drop)
    return M[drop][:, drop].sum().item()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**4), st.integers(1, 7))
def test_groups_cost_hardly_more_than_the_best_set_there_is(seed, drop):
    """Every head by itself, against all subsets; exchanges end where no single one helps."""
    M = costs(seed)
    stay = eliminate_groups(M, drop)
    assert (stay.sum(-1) == 8 - drop).all()
    for head, kept in zip(M, stay, strict=True):
        ours = [i for i in range(8) if not kept[i]]
        best = min(of(head, s) for s in itertools.combinations(range(8), drop))
        assert of(head, ours) <= 1.25 * best + 1e-9 * head.diagonal().sum().item()
        for out, back in itertools.product(ours, [i for i in range(8) if kept[i]]):
            other = [i for i in ours if i != out] + [back]
            assert of(head, ours) <= of(head, other) + 2e-9 * head.diagonal().sum().item()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**4), st.integers(1, 7))
def test_groups_never_cost_more_than_the_smallest_norms(seed, drop):
    M = costs(seed)
    stay = eliminate_groups(M, drop)
    for head, kept in zip(M, stay, strict=True):
        smallest = head.diagonal().topk(drop, largest=False).indices
        assert of(head, (~kept).nonzero()[:, 0]) <= of(head, smallest) * (1 + 1e-12)


def test_groups_that_undo_each_other_go_together():
    """Two dimensions whose products cancel cost nothing as a pair; scores of their own keep both."""
    M = torch.tensor([[5.0, -5.0, 0.0], [-5.0, 5.0, 0.0], [0.0, 0.0, 4.0]], dtype=F64)
    assert eliminate_groups(M, 2).tolist() == [False, False, True]
    assert eliminate_groups(M, 1).tolist() == [True, True, False]


def test_where_nothing_costs_anything_as_many_go_as_shall():
    assert eliminate_groups(torch.zeros(2, 6, 6, dtype=F64), 4).sum(-1).tolist() == [2, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**4), st.sampled_from([4, 8]), st.sampled_from([2, 4, 6, 8]))
def test_pairs_stay_together_in_half_layout(seed, rotary, rank):
    out = eliminate_pairs(costs(seed), rank=rank, rotary_dim=rotary)
    for keep, pairs in zip(out.keep.tolist(), out.pairs.tolist(), strict=True):
        assert len(set(keep)) == rank and pairs == sorted(pairs)
        for a, b, frequency in zip(keep[: rank // 2], keep[rank // 2 :], pairs, strict=True):
            if a < rotary:
                assert (a, b) == (frequency, frequency + rotary // 2)
            else:
                assert b >= rotary and frequency == rotary // 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**4), st.sampled_from([2, 4, 6]))
def test_pairs_cost_hardly_more_than_the_best_pairs(seed, rank):
    """Head of 8 that turns as a whole: four pairs, all subsets."""
    M = costs(seed)
    for head, keep in zip(M, eliminate_pairs(M, rank=rank, rotary_dim=8).keep, strict=True):
        dropped = [i for i in range(8) if i not in keep.tolist()]
        subsets = itertools.combinations(range(4), 4 - rank // 2)
        best = min(of(head, [*s, *(i + 4 for i in s)]) for s in subsets)
        assert of(head, dropped) <= 1.25 * best + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**4), st.sampled_from([2, 4, 6]))
def test_pairs_and_free_dimensions_cost_hardly_more_than_the_best_set(seed, rank):
    """The first 4 of 8 turn: pairs (0, 2), (1, 3), and 4 to 7 by themselves; all sets of the right size."""
    groups = [[0, 2], [1, 3], [4], [5], [6], [7]]
    M = costs(seed)
    for head, keep in zip(M, eliminate_pairs(M, rank=rank, rotary_dim=4).keep, strict=True):
        dropped = [i for i in range(8) if i not in keep.tolist()]
        subsets = [list(itertools.chain(*s)) for r in range(7) for s in itertools.combinations(groups, r)]
        best = min(of(head, s) for s in subsets if len(s) == 8 - rank)
        assert of(head, dropped) <= 1.5 * best + 1e-9


def test_a_bias_that_all_keys_share_is_not_kept_for_its_size():
    """One pair carries a huge constant, which softmax ignores; the others carry what tells keys apart."""
    p = query_key(N=8, H=1, T=16, sequences=4, decay=0.0)
    K = p.K.clone()
    K[..., [0, 4]] = 100 + 1e-3 * K[..., [0, 4]]
    spread = K - K.mean(1, keepdim=True)
    grams = p.Q.mT @ p.Q
    M = (grams * (spread.mT @ spread)[:, None]).sum((0, 1))
    keep = eliminate_pairs(M, rank=6, rotary_dim=8).keep.tolist()
    assert 0 not in keep and 4 not in keep
    first, _, score = pair_up(unit_scores(grams.sum(0), (K.mT @ K).sum(0)), 8)
    assert first[score.argmax()] == 0  # by norms it is the last to go
    lost = torch.einsum("shtn,sun->shtu", p.Q[..., [0, 4]], K[..., [0, 4]])
    softmax = (
        torch.einsum("shtn,sun->shtu", p.Q, K).softmax(-1),
        (torch.einsum("shtn,sun->shtu", p.Q, K) - lost).softmax(-1),
    )
    torch.testing.assert_close(*softmax, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eliminate_units(torch.ones(2, 5), torch.eye(4), rank=2), r"P must be \(5, 5\) for a weight \(2, 5\)"),
        (lambda: eliminate_units(torch.ones(2, 5), torch.eye(5), rank=0), r"rank must be in \[1, 5\], got 0"),
        (
            lambda: eliminate_groups(torch.eye(5), 5),
            "groups of 5 single dimensions and 0 pairs cannot drop 5 and keep some",
        ),
        (
            lambda: eliminate_groups(torch.eye(3), 5, torch.tensor([2, 2, 1])),
            "1 single dimensions and 2 pairs cannot drop 5",
        ),
        (lambda: eliminate_pairs(torch.eye(8), rank=3, rotary_dim=8), r"rank must be even and in \[2, 8\], got 3"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()
