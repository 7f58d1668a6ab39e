"""Costs of units from gradients: against loops over single weights."""

import pytest
import torch

from rankfold.linalg.saliency import damage, taylor

SHAPES = [(5, 3), (5, 2, 4)]  # of two layers, 5 units


def problem():
    torch.manual_seed(0)
    return [[torch.randn(shape) for shape in SHAPES] for _ in range(2)]


def test_damage_is_half_the_fisher_times_the_squared_weight():
    weights, gradients = problem()
    fisher = [g.square() for g in gradients]
    for unit, found in enumerate(damage(weights, fisher).tolist()):
        w, f = (torch.cat([part[unit].flatten() for part in parts]).tolist() for parts in (weights, fisher))
        assert found == pytest.approx(sum(0.5 * b * a**2 for a, b in zip(w, f, strict=True)), rel=1e-5)


def test_damage_is_what_a_quadratic_loss_loses():
    """With a diagonal Hessian the loss at zeroed weights is known exactly."""
    weights, gradients = problem()
    fisher = [g.square() for g in gradients]

    def loss(changes):
        return sum((F * d.square()).sum() / 2 for F, d in zip(fisher, changes, strict=True))

    for unit, found in enumerate(damage(weights, fisher).tolist()):
        changes = [torch.zeros_like(w) for w in weights]
        for change, w in zip(changes, weights, strict=True):
            change[unit] = -w[unit]
        assert found == pytest.approx(loss(changes).item(), rel=1e-5)


def test_taylor_takes_every_weight_by_itself():
    """Two changes that cancel in a sum over the unit both count."""
    weights, gradients = problem()
    for unit, found in enumerate(taylor(weights, gradients).tolist()):
        products = [(W[unit] * g[unit]).flatten().tolist() for W, g in zip(weights, gradients, strict=True)]
        assert found == pytest.approx(sum(abs(x) for part in products for x in part), rel=1e-5)
    assert taylor([torch.ones(1, 2)], [torch.tensor([[3.0, -3.0]])]).tolist() == [6.0]
