"""Devices, and in what precision blocks run on them."""

import pytest
import torch

from rankfold._utils import hardware as processor
from rankfold.errors import OptionError
from rankfold.models.devices import autocast_dtype, resolve_device


@pytest.mark.parametrize(
    ("device", "amx", "avx512_bf16", "vendor", "expected"),
    [
        ("cpu", True, True, "GenuineIntel", torch.bfloat16),
        ("cpu", False, True, "GenuineIntel", None),  # multiplies bf16 in hardware, and takes longer than with fp32
        ("cpu", False, True, "AuthenticAMD", torch.bfloat16),
        ("cpu", False, False, "AuthenticAMD", None),
        ("cuda", True, True, "AuthenticAMD", None),
        ("mps", False, False, "", None),
    ],
)
def test_blocks_run_in_bf16_only_where_that_is_faster(monkeypatch, device, amx, avx512_bf16, vendor, expected):
    monkeypatch.setattr(processor, "cpu_facts", lambda: {"vendor_id": vendor})
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert autocast_dtype(torch.device(device)) is expected


@pytest.mark.parametrize("name", ["cpu:x", "cpu:", "cpu:-1", "cpu:²", "tpu", "", "cuda:x"])
def test_a_device_that_has_no_such_name_is_refused(name):
    with pytest.raises(OptionError, match="device must be auto, cpu, cuda, mps or one of these with a number"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["cpu:1", "cpu:99999999999999999999"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(OptionError, match=f"device '{name}' is not available here"):
        resolve_device(name)


def test_the_one_cpu_has_a_number_too():
    assert resolve_device("cpu:0").type == resolve_device("cpu").type == "cpu"
