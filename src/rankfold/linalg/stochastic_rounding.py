"""Rounding that keeps small changes on average."""

import torch
from torch import Tensor


def round_stochastically(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each number to one of its two neighbours in a coarser dtype, the nearer one more often, so that the mean is
    exact.

    Rounding to the nearest undoes every change below half a unit in the last place, however many weights it moved the
    same way. Numbers that the dtype holds stay as they are, zeros among them.

    Args:
        x: in fp32, on any device.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        generator: on the CPU, so that all devices draw alike.

    Returns:
        A tensor of the dtype, on the device of ``x``. The mean over draws is ``x`` wherever that is in the range of the
        dtype.
    """
    nearest = x.to(dtype)
    error = x - nearest.to(x.dtype)
    upwards = torch.full_like(nearest, torch.inf)
    other = torch.nextafter(nearest, torch.where(error > 0, upwards, -upwards))
    chance = error / (other.to(x.dtype) - nearest.to(x.dtype))
    drawn = torch.rand(x.shape, generator=generator).to(x.device)
    return torch.where(drawn < chance, other, nearest)
