"""Two zeros in every four: which ones by brute force, and what the others become by dense optimal brain surgery."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, activations, problem
from torch import Tensor

import rankfold.linalg.compensation as compensation
from rankfold.linalg.semi_structured import activation_scores, gradient_scores, largest_of_four, surgeon

RIDGE = 1e-2


def in_fours(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 4))


def dense_surgery(W: Tensor, C: Tensor) -> Tensor:
    """One weight after the other: what goes is spread over the columns to its right by an inverse made anew."""
    W, N = W.double().clone(), W.shape[1]
    H = C.double() + RIDGE * C.double().diagonal().mean() * torch.eye(N, dtype=torch.float64)
    inverses = [torch.linalg.inv(H[j:, j:]) for j in range(N)]
    for row in W:
        for j in range(N):
            if j % 4 == 0:
                costs = [(row[i] ** 2 / inverses[i][0, 0]).item() for i in range(j, j + 4)]
                gone = [j + i for i in sorted(range(4), key=costs.__getitem__)[:2]]
            if j in gone:
                row[j:] -= row[j] * inverses[j][0] / inverses[j][0, 0]
                row[j] = 0
    return W


def layers(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, second moment, inputs; widths that are multiples of four."""
    width = 20 if kind == "wide" else 12
    X = activations(kind, width)
    return problem("wide" if width == 20 else "gaussian").W, X.T @ X / len(X), X


@pytest.mark.parametrize("kind", KINDS)
def test_surgery_is_dense_surgery_column_by_column(kind):
    W, C, _ = layers(kind)
    torch.testing.assert_close(surgeon(W, C, ridge=RIDGE), dense_surgery(W, C), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_how_many_columns_are_updated_at_once_changes_nothing(columns, monkeypatch):
    W, C, _ = layers("wide")
    whole = surgeon(W, C)
    monkeypatch.setattr(compensation, "COLUMNS", columns)
    torch.testing.assert_close(surgeon(W, C), whole, rtol=1e-10, atol=1e-10)


def test_without_correlations_surgery_is_wanda_and_changes_no_weight():
    W, _, _ = layers("wide")
    C = torch.diag(torch.linspace(0.1, 5, 20, dtype=torch.float64))
    keep = largest_of_four(activation_scores(W, C))
    torch.testing.assert_close(surgeon(W, C, ridge=1e-9), torch.where(keep, W, 0.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["gaussian", "ill_conditioned", "wide"])
def test_with_correlations_surgery_loses_less_than_a_mask(kind):
    W, C, X = layers(kind)
    masked = torch.where(largest_of_four(activation_scores(W, C)), W, 0.0)
    losses = [(X @ (W - V).T).norm() for V in (surgeon(W, C, ridge=1e-6), masked)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("kind", KINDS)
def test_two_of_four_go(kind):
    W, C, _ = layers(kind)
    assert (in_fours(surgeon(W, C) == 0).sum(-1) == 2).all()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-3, 3), min_size=8, max_size=8))
def test_the_two_largest_stay(values):
    scores = torch.tensor([values], dtype=torch.float64)
    keep = in_fours(largest_of_four(scores))[0]
    for group, kept in zip(in_fours(scores)[0], keep, strict=True):
        best = max(combinations(range(4), 2), key=lambda pair: sum(group[i] for i in pair))  # the first of equal ones
        assert kept.sum() == 2 and group[kept].sum() == sum(group[i] for i in best)


def test_of_equal_scores_the_first_stay():
    assert largest_of_four(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


def test_scores_are_what_a_weight_sends():
    W, C, X = layers("outlier")
    scores = activation_scores(W, C)
    for i, j in ((0, 3), (4, 0), (8, 11)):
        assert scores[i, j].item() == pytest.approx((W[i, j].abs() * X[:, j].norm()).item() / len(X) ** 0.5)


def test_nothing_depends_on_the_scale_of_the_moment():
    W, C, _ = layers("outlier")
    torch.testing.assert_close(surgeon(W, 1e-7 * C), surgeon(W, C), rtol=1e-9, atol=1e-9)
    assert torch.equal(largest_of_four(activation_scores(W, 1e-7 * C)), largest_of_four(activation_scores(W, C)))


def test_where_nothing_comes_in_the_smallest_weights_go():
    W, zero = torch.tensor([[1.0, -4.0, 3.0, 2.0]]), torch.zeros(4, 4, dtype=torch.float64)
    expected = torch.tensor([[0.0, -4.0, 3.0, 0.0]], dtype=torch.float64)
    assert torch.equal(surgeon(W, zero), expected)
    assert torch.equal(torch.where(largest_of_four(activation_scores(W, zero)), W.double(), 0.0), expected)


def test_inputs_that_are_dead_or_alike_do_not_break_it():
    W, _, X = layers("gaussian")
    X[:, 5], X[:, 2] = 0, X[:, 1]
    found = surgeon(W, X.T @ X / len(X))
    assert found.isfinite().all() and (in_fours(found == 0).sum(-1) >= 2).all()


@pytest.mark.parametrize(
    ("W", "C", "message"),
    [
        (torch.ones(2, 6), torch.eye(6), r"inputs are a multiple of four, got \(2, 6\)"),
        (torch.ones(2, 4), torch.eye(8), r"C must be \(4, 4\), got \(8, 8\)"),
        (torch.tensor([[1.0, 2.0, 3.0, float("nan")]]), torch.eye(4), r"W \(1, 4\) has NaN or infinite"),
        (torch.ones(2, 4), torch.full((4, 4), float("inf")), "C has non-finite entries"),
    ],
)
def test_what_cannot_be_done_is_said(W, C, message):
    with pytest.raises(ValueError, match=message):
        surgeon(W, C)


def test_an_indefinite_moment_is_named():
    with pytest.raises(
        torch.linalg.LinAlgError, match=r"the second moment \(4, 4\) is not positive definite.*raise the ridge"
    ):
        surgeon(torch.ones(1, 4), torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0])))


def test_gradients_are_scaled_over_the_layer():
    W, G = torch.tensor([[2.0, -1.0], [3.0, 4.0]]), torch.tensor([[1.0, 3.0], [2.0, 5.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.5], [9 * 0.25, 16.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_scores(W, G), expected)
    torch.testing.assert_close(gradient_scores(W, torch.ones_like(G)), W.double().square())
    with pytest.raises(ValueError, match=r"the gradient must be \(2, 2\) as the weight, got \(1, 2\)"):
        gradient_scores(W, G[:1])
