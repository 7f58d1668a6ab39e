"""Rounding to blocks against a loop that refits what is free by least squares, and against gguf's own rounding."""

import gguf
import pytest
import torch
from problems import problem

from rankfold.exports.gguf_blocks import FORMATS, packed
from rankfold.linalg.block_rounding import RIDGE, choose_steps, round_to_blocks, rounding_order

F, O = 160, 5  # more columns than are updated at once
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(600, F, generator=GENERATOR, dtype=torch.float64) @ torch.randn(F, F, generator=GENERATOR).double()
C = X.mT @ X / len(X)
W = torch.randn(O, F, generator=GENERATOR)


def error(rounded, second=C) -> float:
    gap = W.double() - rounded.double()
    return ((gap @ second) * gap).sum().item()


def by_itself(name: str) -> torch.Tensor:
    """What gguf makes of ``W``, every number rounded by itself."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(W.numpy(), kind), kind))


@pytest.mark.parametrize("levels", [8, 16, 128])
def test_free_columns_are_refitted_by_least_squares_after_every_one(levels):
    rounded = round_to_blocks(W, rounding_order(C), levels=levels)
    H = C + RIDGE * C.diagonal().mean() * torch.eye(F, dtype=torch.float64)
    steps = rounded.steps.double().repeat_interleave(32, 1)
    rest, free = W.double(), H.diagonal().argsort(descending=True).tolist()
    while free:
        j = free.pop(0)
        code = (rest[:, j] / steps[:, j]).round().clamp(-levels, levels - 1)
        assert torch.equal(code.to(torch.int8), rounded.codes[:, j])
        gap = rest[:, j] - code * steps[:, j]
        rest[:, free] += gap[:, None] * torch.linalg.solve(H[free][:, free], H[free, j])
        rest[:, j] -= gap


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_nearer_than_where_every_number_is_rounded_by_itself(name):
    rounded = round_to_blocks(W, rounding_order(C), levels=FORMATS[name].levels).values()
    assert error(rounded) < 0.6 * error(by_itself(name))
    assert error(rounded, torch.eye(F).double()) > error(
        by_itself(name), torch.eye(F).double()
    )  # not by nearer weights


@pytest.mark.parametrize("name", FORMATS)
def test_steps_have_the_least_weighted_error(name):
    levels, weight = FORMATS[name].levels, C.diagonal().float()

    def weighted(step: torch.Tensor) -> torch.Tensor:
        step = step.float().repeat_interleave(32, 1)
        gap = W - (W / step).round().clamp(-levels, levels - 1) * step
        return (gap.square() * weight).unflatten(1, (-1, 32)).sum(2)

    blocks = W.unflatten(1, (-1, 32))
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))[..., 0]
    found = weighted(choose_steps(W, weight, levels=levels))
    of_llama_cpp = weighted((largest / -levels).half())
    assert (found <= of_llama_cpp).all() and found.sum() < 0.95 * of_llama_cpp.sum()
    many = torch.stack([weighted((largest / -levels * (0.8 + 0.002 * k)).half()) for k in range(200)]).amin(0)
    assert found.sum() < (1.03 if levels < 128 else 1.2) * many.sum()  # a search of a fine grid


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_holds_the_very_numbers(name):
    rounded = round_to_blocks(W, rounding_order(C), levels=FORMATS[name].levels)
    back = gguf.quants.dequantize(packed(rounded, name), gguf.GGMLQuantizationType[name.upper()])
    assert torch.equal(torch.from_numpy(back), rounded.values())
    assert rounded.codes.unique().numel() > FORMATS[name].levels  # all bits are used


def test_zeros_stay_and_inputs_that_never_come_cost_nothing():
    silent, some = C.clone(), W.clone()
    silent[40:], silent[:, 40:], some[2] = 0, 0, 0
    rounded = round_to_blocks(some, rounding_order(silent), levels=8)
    assert not rounded.codes[2].any() and rounded.values().isfinite().all()
    nothing = round_to_blocks(some, rounding_order(0 * C), levels=8)
    expected = (some / nothing.steps.float().repeat_interleave(32, 1)).nan_to_num().round().clamp(-8, 7)
    assert torch.equal(nothing.codes, expected.to(torch.int8))


def test_a_matrix_whose_rows_are_no_blocks_is_refused():
    with pytest.raises(ValueError, match=r"a multiple of 32 columns, and as many as there are inputs, got \(5, 159\)"):
        round_to_blocks(W[:, 1:], rounding_order(C[1:, 1:]), levels=8)
    with pytest.raises(ValueError, match=r"as many as there are inputs, got \(5, 160\) and 12 inputs"):
        round_to_blocks(W, rounding_order(problem("gaussian").C), levels=8)
    with pytest.raises(ValueError, match="W must be finite"):
        round_to_blocks(W / 0, rounding_order(C), levels=8)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive definite; use more tokens"):
        rounding_order(C - 10 * C.diagonal().mean() * torch.eye(F).double())
