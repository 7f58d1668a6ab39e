"""Devices, and in what precision blocks run on them."""

import pytest
import torch

from rankfold.checkpoint.devices import autocast_dtype


@pytest.mark.parametrize(
    ("device", "amx", "avx512_bf16", "expected"),
    [
        ("cpu", True, True, torch.bfloat16),
        ("cpu", False, True, None),  # such a CPU multiplies bf16 in hardware, and takes longer than with fp32
        ("cpu", False, False, None),
        ("cuda", True, True, None),
        ("mps", False, False, None),
    ],
)
def test_blocks_run_in_bf16_only_where_that_is_faster(monkeypatch, device, amx, avx512_bf16, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert autocast_dtype(torch.device(device)) is expected
