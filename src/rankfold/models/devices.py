"""Devices and dtypes by name, and in what precision blocks run on them."""

import logging
from collections.abc import Iterable

import torch

from .._utils.hardware import multiplies_bf16_fast, multiplies_slowly
from ..errors import OptionError, option

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """bf16 on CPUs that multiply it faster than fp32; otherwise no autocast."""
    return torch.bfloat16 if device.type == "cpu" and multiplies_bf16_fast() else None


def resolve_dtype(name: str, others: Iterable[str] = ()) -> torch.dtype | None:
    """``torch.dtype`` of a name; ``None`` for ``auto`` (as the checkpoint stores it).

    Args:
        others: names that the caller takes as well, for the message.

    Raises:
        OptionError: any other name.
    """
    if name == "auto":
        return None
    if _SHORT.get(name, name) not in DTYPES:
        raise OptionError(f"dtype must be auto, {', '.join([*DTYPES, *others])}; got {name!r}")
    return DTYPES[_SHORT.get(name, name)]


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tell whether a tensor is on a device; one without a number is the current one of its kind."""
    return tensor.device == device or (
        tensor.device.type == device.type and tensor.device == torch.empty(0, device=device).device
    )


def resolve_device(name: str) -> torch.device:
    """The device of ``cpu``, ``cuda[:i]``, ``mps`` or ``auto`` (an accelerator where there is one).

    Raises:
        OptionError: unknown name, or a device that is not available here.
    """
    available = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return available or torch.device("cpu")
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (index.isascii() and index.isdigit())):
        raise OptionError(
            f"device must be auto, cpu, cuda, mps or one of these with a number such as cuda:1; got {name!r}"
        )
    count = 1 if kind == "cpu" else torch.accelerator.device_count() if available and available.type == kind else 0
    if int(index or 0) >= count:
        raise OptionError(f"device {name!r} is not available here; use {option('device', 'auto')} or cpu")
    return torch.device(name)


def say_if_slow(dtype: torch.dtype, device: torch.device) -> None:
    """Warn of a model that will be run in a 16-bit float on a CPU that has no instructions for it."""
    if device.type == "cpu" and multiplies_slowly(dtype):
        log.warning(
            "the model is run in %s, and this processor has no instructions for that; %s is 2 to 15 times "
            "faster here and takes twice the memory",
            str(dtype).removeprefix("torch."),
            option("dtype", "float32"),
        )
