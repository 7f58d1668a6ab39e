"""Triangles that share a square, against the dense product. CPU, no network."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankfold.modules import build, factors


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 33])
def test_products_are_those_of_the_triangles(size, monkeypatch):
    monkeypatch.setattr(factors, "TRIANGLE", 4)
    g = torch.Generator().manual_seed(size)
    square, x = (
        torch.randn(size, size, generator=g, dtype=torch.float64),
        torch.randn(3, size, generator=g, dtype=torch.float64),
    )
    torch.testing.assert_close(factors.multiply_upper(square, x), x @ square.triu().T)
    torch.testing.assert_close(factors.multiply_lower(square, x), x @ square.tril(-1).T + x)
    for multiply in (factors.multiply_upper, factors.multiply_lower):
        with FlopCounterMode(display=False) as counter:
            multiply(square, x)
        assert counter.get_total_flops() == 2 * len(x) * factors.triangle_macs(size)


def test_a_layer_in_triangles_is_the_packed_one():
    shape = {"in": 200, "out": 190, "rank": 150, "bias": True}
    packed, square = (build({"kind": "latent", "form": form, **shape}) for form in ("lu", "triangles"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.normal_(std=0.05)
        packed.columns.copy_(torch.randperm(200))
        packed.rows.copy_(torch.randperm(190))
        A, B = packed._upper(), packed._lower()
        square.T.weight.copy_(A[:, :150].triu() + B[:150].tril(-1))
        square.A.weight.copy_(A[:, 150:])
        square.B.weight.copy_(B[150:])
        for name in ("bias", "columns", "rows"):
            getattr(square, name).copy_(getattr(packed, name))
        x = torch.randn(2, 5, 200)
        torch.testing.assert_close(square(x), packed(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(square.up_matrix(x), packed.up_matrix(x), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in square.parameters()) == sum(p.numel() for p in packed.parameters())
    square(x).sum().backward()
    grad = square.T.weight.grad
    assert grad.isfinite().all() and grad.count_nonzero() > 0.9 * grad.numel()


def test_one_token_does_not_cost_a_copy_of_both_factors():
    """No operation makes as many numbers as a factor has."""
    layer = build({"kind": "latent", "form": "triangles", "in": 1024, "out": 1024, "rank": 512, "bias": False})
    stored, made = {p.untyped_storage().data_ptr() for p in layer.parameters()}, []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in stored:
                made.append(out.numel())
            return out

    with torch.no_grad(), Sizes():
        layer(torch.randn(1, 1024))
    assert max(made) <= 128 * 128
