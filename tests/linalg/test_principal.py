"""Principal directions against an SVD of the rows, and against every other subspace tried."""

import pytest
import torch

from rankfold.linalg.principal import principal_directions, projection_error

D, T = 9, 60


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return torch.randn(T, D, dtype=torch.float64) @ torch.diag(torch.linspace(3, 0.2, D, dtype=torch.float64)) + 1


@pytest.mark.parametrize("rank", [1, 4, 8, D])
def test_the_subspace_and_the_error_are_those_of_the_svd(rows, rank):
    Q, error = principal_directions(rows.T @ rows / T, rank)
    _, S, Vh = torch.linalg.svd(rows, full_matrices=False)
    torch.testing.assert_close(Q.T @ Q, torch.eye(rank, dtype=Q.dtype))
    torch.testing.assert_close(Q @ Q.T, Vh[:rank].T @ Vh[:rank])
    assert error == pytest.approx((S[rank:].square().sum() / S.square().sum()).sqrt().item(), abs=1e-7)
    order = (rows @ Q).square().sum(0)
    assert torch.equal(order.argsort(descending=True), torch.arange(rank))


def test_no_other_subspace_loses_less(rows):
    C = rows.T @ rows
    best = principal_directions(C, 3).relative_error
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        Q = torch.linalg.qr(torch.randn(D, 3, dtype=torch.float64, generator=generator))[0]
        lost = (rows - rows @ Q @ Q.T).norm() / rows.norm()
        assert projection_error(C, Q) == pytest.approx(lost.item()) and lost > best


def test_neither_scale_nor_the_solver_s_signs_matter(rows):
    C = rows.T @ rows
    one, *others = (principal_directions(scale * C, 5) for scale in (1, 4, 1e-6))
    for other in others:
        torch.testing.assert_close(one.directions, other.directions)
        assert other.relative_error == pytest.approx(one.relative_error)
    largest = one.directions.abs().argmax(0)
    assert (one.directions[largest, torch.arange(5)] > 0).all()


def test_zeros_lose_nothing_and_bad_input_is_refused():
    assert principal_directions(torch.zeros(4, 4), 2).relative_error == 0
    with pytest.raises(ValueError, match=r"rank must be in \[1, 4\], got 5"):
        principal_directions(torch.eye(4), 5)
    with pytest.raises(ValueError, match="non-finite"):
        principal_directions(torch.full((4, 4), float("nan")), 2)
