"""Chunk-wise quantisation against the formula written as a loop. CPU, no network."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import heads

from rankfold.linalg.quantization import dequantize, quantize


def equation_242(x, bits, chunk):
    flat, out = x.flatten(), []
    for start in range(0, len(flat), chunk):
        part = flat[start : start + chunk]
        low, high = part.min(), part.max()
        step = (high - low) / (2**bits - 1)
        out.append((((part - low) / step).round() * step + low) if high > low else part)
    return torch.cat(out).view_as(x)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40))
def test_is_the_papers_formula_chunk_by_chunk(seed, bits, chunk):
    x = heads(1, 5, 7, seed=seed % 1000)[0]
    q = quantize(x, bits=bits, chunk=chunk, scale_dtype=torch.float64)
    torch.testing.assert_close(dequantize(q, torch.float64), equation_242(x, bits, chunk))
    assert int(q.codes.min()) >= 0 and int(q.codes.max()) < 2**bits and len(q.scale) == -(-35 // chunk)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(2, 40), st.floats(1e-3, 1e3))
def test_error_is_at_most_half_a_step(bits, chunk, size):
    x = size * heads(1, 5, 7)[0]
    q = quantize(x, bits=bits, chunk=chunk)
    half = q.scale.double().repeat_interleave(chunk)[:35].view(5, 7) / 2
    assert ((dequantize(q, torch.float64) - x).abs() <= half + 1e-6 * x.abs().max()).all()


@pytest.mark.parametrize("chunk", [8, 35])
def test_more_bits_less_error(chunk):
    x = heads(1, 5, 7)[0]
    errors = [(dequantize(quantize(x, bits=b, chunk=chunk), x.dtype) - x).norm() for b in (1, 2, 4, 8, 12)]
    assert all(b < 0.6 * a for a, b in pairwise(errors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_constant_chunks_come_back(dtype):
    x = torch.tensor([3.25, 3.25, 3.25, -1.0, -1.0], dtype=dtype)
    back = dequantize(quantize(x, bits=4, chunk=3), dtype)
    assert back.dtype == dtype and torch.equal(back, x)


def test_short_scales_are_rounded_before_the_codes():
    x = 1000 + heads(1, 4, 16)[0]  # bf16 cannot hold the lows exactly
    q = quantize(x, bits=8, chunk=16, scale_dtype=torch.bfloat16)
    assert q.scale.dtype == q.low.dtype == torch.bfloat16
    low = q.low.double()[:, None]
    ideal = ((x - low) / q.scale.double()[:, None]).round().clamp(0, 255)
    assert torch.equal(q.codes.view(4, 16).double(), ideal)


def test_codes_above_eight_bits_are_wider():
    x = torch.randn(10, 100)
    assert quantize(x, bits=8, chunk=64).codes.dtype == torch.uint8
    assert quantize(x, bits=9, chunk=64).codes.dtype == torch.int32


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: quantize(x, bits=0, chunk=8), r"bits must be in \[1, 16\], got 0"),
        (lambda x: quantize(x, bits=17, chunk=8), r"bits must be in \[1, 16\], got 17"),
        (lambda x: quantize(x, bits=4, chunk=0), "chunk must be >= 1, got 0"),
        (lambda x: quantize(x / 0, bits=4, chunk=8), "non-empty and finite"),
        (lambda x: quantize(x[:0], bits=4, chunk=8), r"non-empty and finite, got shape \(0, 7\)"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(heads(1, 5, 7)[0])
