"""Type II against matrix roots, brute force over subsets, and the raw query-key products."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modegpt_problems import query_key

from rankfold.linalg.column_row import (
    column_row,
    column_row_bounds,
    eliminate_pairs,
    pair_up,
    relative_cost,
    unit_scores,
)
from rankfold.linalg.psd import psd_root

F64 = torch.float64
SEEDS = st.integers(0, 10**4)


def moments(energy_q, energy_k) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.diag(torch.tensor(energy_q, dtype=F64))[None], torch.diag(torch.tensor(energy_k, dtype=F64))


def rest(keep: torch.Tensor, N: int) -> torch.Tensor:
    return torch.tensor([i for i in range(N) if i not in keep.tolist()], dtype=torch.long)


@pytest.mark.parametrize("heads", [1, 3])
def test_score_is_the_product_of_the_column_norms_of_the_roots(heads):
    p = query_key(H=heads)
    root_k = psd_root(p.C_k).root
    stacked = torch.cat([psd_root(c).root for c in p.C_q])  # the group's queries side by side: one tall factor
    reference = stacked.norm(dim=0) * root_k.norm(dim=0)
    torch.testing.assert_close(unit_scores(p.C_q, p.C_k), reference, rtol=1e-9, atol=0)


def test_score_is_the_product_of_raw_activation_norms():
    p = query_key(H=2)
    torch.testing.assert_close(unit_scores(p.C_q, p.C_k), p.Q.flatten(0, 2).norm(dim=0) * p.K.flatten(0, 1).norm(dim=0))


def test_an_energy_that_lost_its_sign_in_rounding_scores_zero():
    C_q, C_k = moments([1.0, -1e-12], [1.0, 1.0])
    assert unit_scores(C_q, C_k).tolist() == [1.0, 0.0]


def test_heads_are_paired_up_one_by_one():
    scores = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    together = pair_up(scores, 4)
    for i, j in itertools.product(range(3), range(2)):
        for ours, alone in zip(together, pair_up(scores[i, j], 4), strict=True):
            assert torch.equal(ours[i, j], alone)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.sampled_from([0, 2, 4, 6, 8]), st.sampled_from([2, 4, 6, 8]))
def test_rotary_partners_stay_together_and_nothing_is_kept_twice(seed, rotary, rank):
    p = query_key(seed=seed)
    out = column_row(p.C_q, p.C_k, rank=rank, rotary_dim=rotary)
    kept, half = out.keep.tolist(), rotary // 2
    assert len(set(kept)) == rank and out.pairs.shape == (rank // 2,)
    for dim in kept:
        if dim < rotary:
            assert (dim + half if dim < half else dim - half) in kept


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.sampled_from([0, 4, 8]), st.sampled_from([2, 4, 6, 8]))
def test_kept_dimensions_are_in_half_layout_with_their_frequency(seed, rotary, rank):
    """Turning ``keep[i]`` with ``keep[i + R/2]`` by frequency ``pairs[i]`` is what the dense head did to them."""
    p = query_key(seed=seed)
    out = column_row(p.C_q, p.C_k, rank=rank, rotary_dim=rotary)
    for a, b, frequency in zip(out.keep[: rank // 2].tolist(), out.keep[rank // 2 :].tolist(), out.pairs, strict=True):
        if a < rotary:
            assert (a, b) == (int(frequency), int(frequency) + rotary // 2)
        else:
            assert b >= rotary and frequency == rotary // 2
    assert out.pairs.tolist() == sorted(out.pairs.tolist())


def test_scores_survive_the_selected_rotation():
    """Queries and keys rotated first and selected then equal those selected first and rotated with the kept pairs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 8, generator=g, dtype=F64)
    C = torch.eye(8, dtype=F64) + torch.diag(torch.rand(8, generator=g, dtype=F64))
    out = column_row(C[None], C, rank=6, rotary_dim=4)
    angle = torch.arange(7, dtype=F64)[:, None] * torch.tensor([1.0, 0.1, 0.0], dtype=F64)  # the last: does not turn

    def turn(z, pairs):
        (a, b), cos, sin = z.chunk(2, -1), angle[:, pairs].cos(), angle[:, pairs].sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    dense = torch.cat([turn(x[:, :4], [0, 1]), x[:, 4:]], -1)
    torch.testing.assert_close(dense[:, out.keep], turn(x[:, out.keep], out.pairs.tolist()))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([0, 4, 8]), st.sampled_from([2, 4, 6]))
def test_no_other_set_of_pairs_has_a_larger_sum_of_scores(seed, rotary, rank):
    p = query_key(seed=seed)
    first, second, score = pair_up(unit_scores(p.C_q, p.C_k), rotary)
    assert sorted(torch.cat([first, second]).tolist()) == list(range(8))
    kept = set(column_row(p.C_q, p.C_k, rank=rank, rotary_dim=rotary).keep.tolist())
    ours = sum(s.item() for f, s in zip(first.tolist(), score, strict=True) if f in kept)
    best = max(sum(score[i].item() for i in subset) for subset in itertools.combinations(range(4), rank // 2))
    assert ours == pytest.approx(best, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([2, 4, 6]))
def test_without_rotation_the_top_dimensions_stay(seed, rank):
    p = query_key(seed=seed)
    top = unit_scores(p.C_q, p.C_k).topk(rank).indices
    assert set(column_row(p.C_q, p.C_k, rank=rank, rotary_dim=0).keep.tolist()) == set(top.tolist())


def test_partial_rotation_weighs_pairs_against_free_dimensions():
    """Head of 8, the first 4 turn: pairs (0, 2), (1, 3); 5 and 6 are the best free ones."""
    C_q, C_k = moments([9, 1, 9, 1, 1, 50, 40, 0], [1] * 8)
    assert column_row(C_q, C_k, rank=2, rotary_dim=4).keep.tolist() == [5, 6]
    out = column_row(C_q, C_k, rank=4, rotary_dim=4)
    assert out.keep.tolist() == [0, 5, 2, 6] and out.pairs.tolist() == [0, 2]


def test_full_rank_keeps_everything():
    p = query_key()
    out = column_row(p.C_q, p.C_k, rank=8, rotary_dim=8)
    assert out.keep.tolist() == list(range(8)) and out.pairs.tolist() == [0, 1, 2, 3]


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.floats(-10, 10), st.floats(-10, 10))
def test_scale_of_the_statistics_does_not_matter(seed, a, b):
    p = query_key(seed=seed)
    ours = column_row(10**a * p.C_q, 10**b * p.C_k, rank=4, rotary_dim=8)
    assert torch.equal(ours.keep, column_row(p.C_q, p.C_k, rank=4, rotary_dim=8).keep)


def test_ties_go_to_the_lower_frequency():
    assert column_row(torch.eye(8)[None], torch.eye(8), rank=4, rotary_dim=8).keep.tolist() == [0, 1, 4, 5]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 4, 8]), st.sampled_from([2, 4, 6]))
def test_theorem_2_bounds_the_cost_measured_on_the_raw_sequences(seed, heads, sequences, rotary, rank):
    p = query_key(seed=seed, H=heads, sequences=sequences)
    keep = column_row(p.C_q, p.C_k, rank=rank, rotary_dim=rotary).keep
    theorem, _ = column_row_bounds(p.C_q, p.C_k, keep)
    assert p.cost(rest(keep, 8)) <= theorem * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sets(st.integers(0, 7), min_size=1, max_size=7))
def test_theorem_2_holds_for_any_selection_and_is_exact_for_one_sequence(seed, kept):
    keep = torch.tensor(sorted(kept))
    p, one = query_key(seed=seed, sequences=3), query_key(seed=seed, sequences=1)
    assert p.cost(rest(keep, 8)) <= column_row_bounds(p.C_q, p.C_k, keep)[0] * (1 + 1e-9)
    assert column_row_bounds(one.C_q, one.C_k, keep)[0] == pytest.approx(one.cost(rest(keep, 8)), rel=1e-9)


def test_theorem_2_is_the_error_of_the_matrix_roots():
    p = query_key(H=1)
    keep = torch.tensor([0, 2, 3])
    selection = torch.diag(torch.isin(torch.arange(8), keep).double())
    root_k, root_q = psd_root(p.C_k).root, psd_root(p.C_q[0]).root
    reference = (root_k @ root_q - root_k @ selection @ root_q).square().sum().item()
    assert column_row_bounds(p.C_q, p.C_k, keep)[0] == pytest.approx(reference, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 3), st.sets(st.integers(0, 7), min_size=1, max_size=8))
def test_the_summed_product_of_grams_is_the_exact_cost(seed, heads, kept):
    """What the pipeline reports: ``sum_(i,j in D) M_ij`` with ``M = sum_n (Q_n^T Q_n) o (K_n^T K_n)``."""
    p, dropped = query_key(seed=seed, H=heads), rest(torch.tensor(sorted(kept)), 8)
    grams_q, grams_k = p.Q.mT @ p.Q, (p.K.mT @ p.K)[:, None]
    M = (grams_q * grams_k).sum((0, 1))
    assert M[dropped][:, dropped].sum().item() == pytest.approx(p.cost(dropped), rel=1e-9, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]), st.floats(0, 1))
def test_proposition_2_holds_where_single_dimensions_are_chosen(seed, heads, sequences, rank, decay):
    """Its step (b) is not true of each factor, but the mean of the dropped products is at most the mean of all, and
    Cauchy-Schwarz over ALL dimensions gives the same end; with the score of the group this covers grouped queries."""
    p = query_key(seed=seed, H=heads, sequences=sequences, decay=decay)
    keep = column_row(p.C_q, p.C_k, rank=rank, rotary_dim=0).keep
    theorem, proposition = column_row_bounds(p.C_q, p.C_k, keep)
    assert p.cost(rest(keep, 8)) <= theorem * (1 + 1e-9) <= proposition * (1 + 1e-8)


def test_proposition_2_is_tight_where_all_dimensions_are_alike():
    one = torch.ones(8, 8, dtype=F64)
    theorem, proposition = column_row_bounds(one[None], one, torch.arange(2))
    assert theorem == proposition == 36.0


def test_step_b_of_the_proof_of_proposition_2_does_not_hold():
    """Choice by the product: the dropped half may hold MOST of the query energy."""
    C_q, C_k = moments([1.0, 100.0], [1.0, 0.001])
    scores = unit_scores(C_q, C_k)
    assert scores[0] > scores[1]  # dimension 1 goes
    energy_q, energy_k = C_q[0, 1, 1], C_k[1, 1]
    assert energy_q > 0.5 * C_q.diagonal(dim1=1, dim2=2).sum()
    assert energy_q * energy_k <= 0.25 * C_q.sum() * C_k.sum()  # the end of the chain holds all the same


def test_proposition_2_holds_where_pairs_are_chosen():
    """Head of 4, pairs (0, 2) and (1, 3), one token with query = key = v, energies v_i^2 = (1, 0.7, 0, 0.7).

    Dropping a pair costs ``(v_a^2 + v_b^2)^2``: 1 for the first, 1.96 for the second, and the bound is (1/2)^2 2.4^2 =
    1.44. Ranked by the root of the sum of SQUARED scores the second pair goes; by their sum (or by the block's norm
    product, which is never less) the first goes, and then the averaging argument of the proposition holds for pairs."""
    v = torch.tensor([1.0, 0.7, 0.0, 0.7], dtype=F64).sqrt()
    C = torch.outer(v, v)
    out = column_row(C[None], C, rank=2, rotary_dim=4)
    theorem, proposition = column_row_bounds(C[None], C, out.keep)
    assert theorem == pytest.approx((v @ v - v[out.keep] @ v[out.keep]).item() ** 2)  # one sequence: the exact cost
    assert theorem <= proposition


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 2), st.sampled_from([2, 4, 6]))
def test_proposition_2_holds_for_pairs_ranked_by_the_sum_of_their_scores(seed, heads, rank):
    """Dense computation of the remedy: rank-one moments are the worst case for the chain of inequalities."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.rand(heads, 1, 8, generator=g, dtype=F64) ** 3, torch.rand(1, 8, generator=g, dtype=F64) ** 3
    C_q, C_k = q.mT @ q, k.mT @ k
    s = unit_scores(C_q, C_k)
    block = (C_q.diagonal(dim1=1, dim2=2).sum(0).view(2, 4).sum(0) * C_k.diagonal().view(2, 4).sum(0)).sqrt()
    for score in (s[:4] + s[4:], block):
        pairs = score.topk(rank // 2).indices
        theorem, proposition = column_row_bounds(C_q, C_k, torch.cat([pairs, pairs + 4]))
        assert theorem <= proposition * (1 + 1e-9)


def test_blocks_choose_together_by_their_relative_errors():
    """Two blocks of scores of very different size, two heads each, against the raw products of all choices of pairs."""
    generator, sizes = torch.Generator().manual_seed(3), torch.tensor([[1.0, 1, 3, 1], [90, 60, 30, 30]]).repeat(1, 2)
    blocks = [
        size * torch.randn(2, 2, 20, 8, generator=generator, dtype=F64) for size in sizes
    ]  # (q and k, heads, ...)
    costs = [(q.mT @ q) * (k.mT @ k) for q, k in blocks]
    lost = {}
    for kept in itertools.combinations(range(4), 2):
        gone = [p + half for half in (0, 4) for p in range(4) if p not in kept]
        lost[kept] = sum(((q[..., gone] @ k[..., gone].mT).norm() / (q @ k.mT).norm()).item() ** 2 for q, k in blocks)
        assert sum(relative_cost(M)[gone][:, gone].sum().item() for M in costs) == pytest.approx(lost[kept])
    chosen = eliminate_pairs(sum(map(relative_cost, costs)), rank=4, rotary_dim=8)
    assert tuple(chosen.pairs.tolist()) == min(lost, key=lost.get) == (0, 2)
    alone = eliminate_pairs(sum(costs).sum(0), rank=4, rotary_dim=8)
    assert alone.pairs.tolist() == [0, 1]  # by the larger scores alone


def test_scores_that_never_change_count_for_nothing():
    assert relative_cost(torch.zeros(2, 4, 4)).tolist() == [[0.0] * 4] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: column_row(p.C_q, p.C_k, rank=3, rotary_dim=8), r"rank must be even and in \[2, 8\], got 3"),
        (lambda p: column_row(p.C_q, p.C_k, rank=0, rotary_dim=8), r"rank must be even and in \[2, 8\], got 0"),
        (lambda p: column_row(p.C_q, p.C_k, rank=10, rotary_dim=8), r"rank must be even and in \[2, 8\], got 10"),
        (lambda p: column_row(p.C_q, p.C_k, rank=2, rotary_dim=3), "must be even in number, got 3 and 5"),
        (lambda p: pair_up(torch.ones(7), 4), "must be even in number, got 4 and 3"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(query_key())
