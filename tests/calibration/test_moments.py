"""Streaming moments against dense formulas on all rows at once."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import opened
from rankfold.calibration import moments
from rankfold.calibration.moments import (
    FP32_ROWS,
    TILE,
    CrossMoment,
    CrossSums,
    HeadMoment,
    Moment,
    Samples,
    VectorMoment,
    accumulator,
    check_finite,
    gram,
    head_grams,
    heads_first,
    upper_tiles,
)
from rankfold.compression.block import decompose
from rankfold.errors import NumericsError
from rankfold.methods import CompressionStep

F64 = torch.float64
CPU = torch.device("cpu")


def draw(*shape, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


def streamed(batches) -> Moment:
    moment = VectorMoment(absolute=True)
    for batch in batches:
        moment.add(batch)
    return moment.finish()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 13), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 100))
def test_streamed_batches_are_the_dense_formula(width, sizes, seed):
    x = draw(sum(sizes), width, seed=seed)
    ours, rows = streamed(x.split(sizes)), x.double()
    assert ours.count == len(rows)
    torch.testing.assert_close(ours.mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.mean_absolute, rows.abs().mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.second_moment(), rows.T @ rows / len(rows), rtol=1e-5, atol=1e-6)
    centred = rows - rows.mean(0)
    torch.testing.assert_close(ours.covariance(), centred.T @ centred / len(rows), rtol=1e-4, atol=1e-5)


def test_results_are_fp64_and_the_moment_is_symmetric():
    ours = streamed([draw(50, 9)])
    assert {ours.second_moment().dtype, ours.mean.dtype, ours.covariance().dtype, ours.mean_absolute.dtype} == {F64}
    assert torch.equal(ours.second_moment(), ours.second_moment().T)


def test_leading_dimensions_are_rows():
    x = draw(2, 5, 7, 4)
    a, b = streamed([x]), streamed([x.flatten(0, 2)])
    assert a.count == 70 and torch.equal(a.second_moment(), b.second_moment())


def test_sums_over_many_batches_do_not_lose_small_ones():
    """fp32 sums of 2^30 would not move for another 1."""
    moment = VectorMoment(absolute=True)
    large, ones = torch.zeros(FP32_ROWS, 1), torch.ones(FP32_ROWS // 2, 1)
    large[0] = 2.0**15
    for batch in (large, ones, ones):
        moment.add(batch)
    out = moment.finish()
    assert out.second.item() == 2.0**30 + FP32_ROWS and out.total.item() == 2.0**15 + FP32_ROWS


def test_one_large_batch_is_summed_like_small_ones():
    """No fp32 sum covers more rows than small batches would give it: here one would lose every row after the first."""
    x, t = torch.ones(3 * FP32_ROWS + 5, 1), torch.ones(3 * FP32_ROWS + 5, 1)
    x[0] = t[0] = 2.0**15
    moment, sums = VectorMoment(), CrossSums()
    moment.add(x[:7])  # so that a sum is under way when the large batch comes
    moment.add(x[7:])
    sums.add(x[:7], t[:7])
    sums.add(x[7:], t[7:])
    assert moment.finish().second.item() >= 2.0**30 + 2 * FP32_ROWS
    assert sums.finish().second.item() >= 2.0**30 + 2 * FP32_ROWS


@pytest.mark.parametrize("width", [1, 3, 8, 33])
def test_bf16_activations_are_measured_exactly(width):
    """Products of bf16 numbers fit fp32; where their sums fit too, nothing at all is lost."""
    x = torch.randint(-255, 256, (64, width), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ours, rows = streamed(x.split(16)), x.double()
    assert torch.equal(ours.second, rows.T @ rows)
    assert torch.equal(ours.total, rows.sum(0)) and torch.equal(ours.absolute, rows.abs().sum(0))


def test_bf16_activations_with_fractions_are_measured_as_well_as_fp32_ones():
    x = draw(500, 16, dtype=torch.bfloat16)
    rows = x.double()
    reference = rows.T @ rows
    error = (streamed([x]).second - reference).abs().max() / reference.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("N", [1, 7, TILE, TILE + 1, 2 * TILE + 76])
def test_gram_fills_the_upper_tiles(N):
    x, sums = draw(30, N), upper_tiles(N, CPU)
    gram(x, sums)
    gram(x, sums)
    whole = 2 * x.T @ x
    assert sum(len(tile) for tile in sums) == N
    for i, tile in enumerate(sums):
        torch.testing.assert_close(tile, whole[i * TILE :][: len(tile), i * TILE :], rtol=1e-5, atol=1e-5)


def test_wide_moments_are_whole_and_symmetric():
    x = draw(40, TILE + 9)
    ours = streamed(x.split(7))
    torch.testing.assert_close(ours.second, x.double().T @ x.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.second, ours.second.T)


@pytest.mark.parametrize("fails", [False, True])
def test_the_precision_of_products_elsewhere_is_left_alone(fails):
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    if fails:
        with pytest.raises((RuntimeError, IndexError)):
            gram(torch.zeros(3, 2, dtype=torch.bfloat16), [torch.zeros(5, 7)])
    else:
        gram(torch.zeros(3, 2, dtype=torch.bfloat16), upper_tiles(2, CPU))
    assert backend.fp32_precision == before


def test_devices_that_multiply_half_precision_into_fp32_are_given_half_precision(monkeypatch):
    """A stand-in for the accelerator's product, on CUDA only: nothing is cast before it, and fp32 comes out."""
    called = []

    def widening(a, b, *, out_dtype):
        called.append((a.dtype, b.dtype, out_dtype))
        return a.float() @ b.float()

    monkeypatch.setattr(moments, "_widens", lambda device, dtype: True)
    monkeypatch.setattr(torch, "mm", widening)
    x = draw(40, TILE + 9, dtype=torch.bfloat16)
    ours = streamed(x.split(7)).second
    assert set(called) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    torch.testing.assert_close(ours, x.double().T @ x.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9))
def test_samples_are_every_so_many_rows_whatever_the_batches(sizes, stride):
    x, samples = draw(sum(sizes), 3), Samples(stride)
    for batch in x.split(sizes):
        samples.add(batch[None])
    out = samples.finish()
    assert torch.equal(out.rows, x[::stride]) and out.count == len(out.rows)


def test_heads_are_measured_one_by_one():
    x = draw(6, 10, 3, 4)  # (B, T, H, N)
    moment = HeadMoment()
    for part in (heads_first(x[:2]), heads_first(x[2:])):
        moment.add(part, head_grams(part))
    ours = moment.finish()
    assert ours.count == 60 and ours.second.dtype == F64
    for head in range(3):
        rows = x[:, :, head].flatten(0, 1).double()
        torch.testing.assert_close(ours.second_moment()[head], rows.T @ rows / 60, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.mean[head], rows.mean(0), rtol=1e-5, atol=1e-5)
        centred = rows - rows.mean(0)
        torch.testing.assert_close(ours.covariance()[head], centred.T @ centred / 60, rtol=1e-4, atol=1e-4)


def test_head_grams_are_per_sequence():
    x = draw(2, 5, 3, 4)
    out = head_grams(heads_first(x))
    assert out.shape == (2, 3, 4, 4)
    torch.testing.assert_close(out[1, 2], x[1, :, 2].T @ x[1, :, 2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["total", "second", "rows"])
def test_moments_that_are_not_finite_name_the_block_and_the_statistic(part, value):
    tensors = {"total": torch.zeros(2), "absolute": None, "second": torch.zeros(2, 2), "rows": torch.zeros(2, 2)}
    tensors[part].view(-1)[0] = value
    message = r"activations of model\.layers\.3 \(mlp_hidden\) are NaN or infinite; try dtype='float32'"
    with pytest.raises(NumericsError, match=message):
        check_finite({"query": streamed([draw(4, 2)]), "mlp_hidden": Moment(1, **tensors)}, "model.layers.3")
    check_finite({"influence": Moment(1, torch.ones(3), None, None)}, "model.layers.3")


def test_moments_are_made_where_the_activations_are():
    """One device only is here, so the default becomes "meta", which holds no numbers."""
    x = draw(5, 4)
    with torch.device("meta"):
        ours, heads = streamed([x]), heads_first(x.view(1, 5, 2, 2))
    assert {t.device.type for t in (ours.total, ours.absolute, ours.second, heads)} == {"cpu"}


def test_sums_in_fp64_live_beside_the_products_where_the_device_has_fp64():
    assert [accumulator(torch.device(name)).type for name in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "cpu"]


def test_within_windows_is_the_mean_of_their_covariances():
    x = draw(5, 7, 4) + 3 * draw(5, 1, 4, seed=1)  # windows whose means differ
    rows = x.flatten(0, 1).double()
    found = Moment(35, rows.sum(0), None, rows.T @ rows, windows=x.double().sum(1)).within_windows()
    expected = torch.stack([torch.cov(window.T, correction=0) for window in x.double()]).mean(0)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, torch.cov(rows.T, correction=0), rtol=0.1)


def test_sums_in_fp32_are_of_few_rows(monkeypatch):
    """After 2^27 in fp32 a 4 is lost, so what was summed by then lies in fp64."""
    monkeypatch.setattr(moments, "FP32_ROWS", 8)
    vector = moments.VectorMoment()
    for value in (4096.0, 4096.0, 1.0, 1.0, 1.0):
        vector.add(torch.full((4, 1), value))
    assert vector.finish().second.item() == 8 * 2**24 + 12


def test_moments_are_beside_the_weights_they_go_with():
    """What was kept in a folder is on the CPU; "meta" stands for another device."""
    view, seen = opened("llama").block(0), {}
    view = dataclasses.replace(view, module=copy.deepcopy(view.module).to("meta"))
    there = {"mlp_hidden": streamed([draw(4, 2)]), "cross": CrossMoment(4, *(torch.zeros(2) for _ in range(3)))}
    decompose(CompressionStep(set(), lambda _, moments, __: seen.update(moments)), view, there)
    parts = [part for moment in seen.values() for part in vars(moment).values() if isinstance(part, torch.Tensor)]
    assert len(parts) == 6 and {part.device.type for part in parts} == {"meta"} and seen["mlp_hidden"].count == 4


def test_what_never_varies_has_no_covariance_and_the_rest_keeps_its_own():
    """The products are summed in fp32, whose rounding is no variance; a small variance is one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    x[:, 1], x[:, 3] = 0.731, 5 + 0.02 * x[:, 3]
    moment = Moment(float(len(x)), x.sum(0), None, x.T @ x)
    found, expected = moment.covariance(), torch.cov(x.double().T, correction=0)
    assert not found[1].any() and not found[:, 1].any()
    others = torch.tensor([0, 2, 3])
    assert torch.allclose(found[others][:, others], expected[others][:, others], atol=1e-4)
    assert found[3, 3].item() == pytest.approx(0.02**2, rel=0.1)
    away = moment.about(moment.mean + torch.tensor([0, 0.1, 0, 0]))
    assert away[1, 1].item() == pytest.approx(0.01, rel=1e-2)
