"""What this processor is good at, and what time it is there."""

import functools
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")


@functools.cache
def cpu_facts() -> dict[str, str]:
    """What Linux says of the first core, such as ``model name`` and ``vendor_id``; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            lines = handle.read().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def multiplies_bf16_fast() -> bool:
    """Whether the CPU multiplies bf16 faster than fp32: with AMX, three times, and with AVX512-BF16 by AMD, four times.

    Intel's AVX512-BF16 alone does not pay: products of bf16 take longer there than of fp32 (linear 25.5 ms against
    19.5, Gram 10.2 against 5.8, attention 33 against 22). AMD's has the full width (Zen 5: linear 4.7 against 19.5,
    Gram 25.6 against 52.3, attention 23.7 against 22.8).
    """
    if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
        return True
    return getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() and "AMD" in _vendor()


def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions for a 16-bit float, so that PyTorch multiplies it number by number.

    With AVX2 alone a linear layer takes 15 times as long in bf16 as in fp32 for 512 tokens, 6 times for 16, twice for
    one.
    """
    kernels = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in kernels or not torch.backends.mkldnn.is_available():
        return False
    return not getattr(torch.ops.mkldnn, kernels[dtype], lambda: True)()


def _vendor() -> str:
    return cpu_facts().get("vendor_id") or platform.processor()


def now(device: torch.device) -> float:
    """The time at which all work given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time a call, with all work that it gives to ``device``."""
    begin = now(device)
    run()
    return now(device) - begin


def in_rounds(calls: Mapping[K, Callable[[], T]], rounds: Iterable[object]) -> Iterator[dict[K, T]]:
    """Call all of these once in every round, and yield what each of them returned.

    Every round begins with the next one. A machine that slows down for a moment slows one round of all, so ratios
    within a round hardly change.
    """
    order = deque(calls)
    for _ in rounds:
        yield {name: calls[name]() for name in order}
        order.rotate(-1)
