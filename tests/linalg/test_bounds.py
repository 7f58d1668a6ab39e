"""Every bound of the papers that is reported, within 2 % of an independent computation, at the widths models have."""

import pytest
import torch
from modegpt_problems import mlp, query_key, value_output

from rankfold.linalg import lanczos
from rankfold.linalg.column_row import column_row, column_row_bounds
from rankfold.linalg.lanczos import largest_eigenvalue
from rankfold.linalg.nystrom import nystrom
from rankfold.linalg.paired_svd import paired_factors

F64 = torch.float64
CLOSE = 0.02
WIDTHS = (64, 256, 1024, pytest.param(2048, marks=pytest.mark.matrix))


def is_tight(found: float, exact: float) -> bool:
    """Whether a bound holds and is less than 2 % too large."""
    return exact * (1 - 1e-9) <= found <= exact * (1 + CLOSE)


def quiet(F: int, units: int, loudness: float):
    """Activations whose first ``units`` are so much quieter than the others that their leverage sums to under 1."""
    g = torch.Generator().manual_seed(F)
    a = torch.randn(2 * F, F, generator=g, dtype=F64)
    a[:, :units] *= loudness
    return a.T @ a / len(a), torch.randn(F // 4, F, generator=g, dtype=F64)


@pytest.mark.parametrize("kind", ["gaussian", "ill_conditioned"])
@pytest.mark.parametrize("F", WIDTHS)
def test_theorem_1_is_the_papers_formula(F, kind):
    p = mlp(kind, F=F, D=F // 4, tokens=2 * F)
    rank, ridge = 2 * F // 3, 1e-4
    out = nystrom(p.W, p.C, rank=rank, ridge=ridge, selection="leverage")
    C = p.C + ridge * p.C.diagonal().mean() * torch.eye(F, dtype=F64)
    k = out.keep
    residual = C - C[:, k] @ torch.linalg.solve(C[k][:, k], C[k])
    norms = torch.linalg.svdvals(p.W)[0] ** 2 / torch.linalg.eigvalsh(C)[0]
    assert is_tight(out.bounds.theorem, (norms * residual.square().sum()).item())


@pytest.mark.parametrize("F", WIDTHS)
def test_proposition_1_is_its_formula(F):
    ridge, rank = 1e-3, F - F // 16
    C, W = quiet(F, F // 16, 1e-3)
    out = nystrom(W, C, rank=rank, ridge=ridge, selection="leverage")
    lam = ridge * C.diagonal().mean()
    scores = 1 - lam * torch.linalg.inv(C + lam * torch.eye(F, dtype=F64)).diagonal()
    dropped = torch.ones(F, dtype=torch.bool)
    dropped[out.keep] = False
    epsilon = scores[dropped].sum()
    assert epsilon < 1
    exact = lam * epsilon / (1 - epsilon) * torch.linalg.svdvals(W[:, dropped])[0] ** 2
    assert is_tight(out.bounds.proposition, exact.item())


@pytest.mark.parametrize("N", [64, 128, 256])
def test_theorem_and_proposition_2_are_the_papers_formulas(N):
    """Theorem 2 by matrix roots, Proposition 2 by traces; both over the group."""
    p = query_key(N=N, T=2 * N, decay=4 / N)
    keep = column_row(p.C_q, p.C_k, rank=N // 2, rotary_dim=N).keep
    rest = torch.eye(N, dtype=F64)
    rest[keep, keep] = 0.0

    def root(C):
        values, U = torch.linalg.eigh(C)
        return (U * values.clamp_min(0).sqrt()) @ U.T

    theorem = sum(torch.linalg.matrix_norm(root(p.C_k) @ rest @ root(C)) ** 2 for C in p.C_q).item()
    proposition = sum(torch.trace(p.C_k) * torch.trace(C) for C in p.C_q).item() / 4
    found = column_row_bounds(p.C_q, p.C_k, keep)
    assert [part.item() for part in found] == pytest.approx([theorem, proposition], rel=1e-6)


@pytest.mark.parametrize("heads", [1, 3])
def test_proposition_3_is_the_tail_of_the_spectrum_in_model_dimension(heads):
    p = value_output("gaussian", G=heads)
    values, U = torch.linalg.eigh(p.C)
    S = torch.linalg.svdvals(p.W_o.flatten(0, 1) @ p.W_v @ (U * values.clamp_min(0).sqrt()) @ U.T)
    assert paired_factors(p.A, p.B).truncated(3).error.item() == pytest.approx(S[3:].square().sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    "spectrum",
    {
        "flat": torch.linspace(0.999, 1, 2048, dtype=F64),
        "one outlier that the start hardly sees": torch.cat([torch.ones(2047), torch.tensor([1.03])]).double(),
        "two that nearly tie": torch.cat([torch.linspace(0, 1, 2046), torch.tensor([1.999, 2.0])]).double(),
        "a slow decay": torch.linspace(0, 1, 2048, dtype=F64).square(),
        "thirteen decades": torch.logspace(-13, 0, 2048, dtype=F64),
        "nothing": torch.zeros(64, dtype=F64),
        "one number": torch.tensor([3.0], dtype=F64),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_the_largest_eigenvalue_is_bounded_closely_from_above(spectrum):
    values = spectrum[1]
    found = largest_eigenvalue(lambda x: values * x, values)
    assert values.max() <= found <= values.max() * 1.01


@pytest.mark.parametrize("steps", [4, 8])
def test_what_a_few_steps_leave_open_is_added(steps, monkeypatch):
    monkeypatch.setattr(lanczos, "MOST", steps)
    values = torch.linspace(1, 2, 64, dtype=F64)
    assert largest_eigenvalue(lambda x: values * x, values) >= 2
