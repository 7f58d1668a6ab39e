"""A pretend CUDA device on a CPU: tensors that are on ``cuda:0`` by what they tell, and hold a tensor of the CPU.

To mix devices raises, as on CUDA, with the line of rankfold that did; every place where the host waits for the device
is counted. There are no streams, no numerics of CUDA and no backward pass, for which autograd wants a real device.
"""

import contextlib
import functools
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
MEMORY = 2**20  # bytes, so that a forward takes as many tokens as on a CPU
# PyTorch for CPUs has no guard of this device, which makes it current for a call: with one, none is needed.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void put_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""
# Operations that take tensors of several devices, on CUDA too.
MIXING = {
    *("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"),
    *("aten::set_", "aten::lift_fresh", "aten::_unsafe_index"),
}
INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}
# Operations whose result the host waits for.
WAITING = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"),
    *("aten::_linalg_check_errors", "aten::unique_consecutive", "aten::is_nonzero"),
}

waits: Counter[str] = Counter()  # line of rankfold -> how often the host waited there


class Pretend(torch.Tensor):
    """A tensor of the pretend device."""

    __module__ = "torch"  # other classes of tensors are those of quantisers

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    def tolist(self):
        waits[_where()] += 1
        return self.inner.tolist()

    def view(self, *shape):
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return Pretend(self.inner.view(shape[0]))
        return super().view(*shape)

    def numpy(self, *_, **__):
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {_where()}")

    def __repr__(self, **_):
        return f"Pretend({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """What is made without a tensor, or moved, may come to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _where() -> str:
    """Return the innermost line of rankfold that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/src/rankfold/")
        if found:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


def _run(func, args, kwargs):
    """Run an operation on the CPU tensors inside, and put what it gives on the device it would be on."""
    name, given = func._schema.name, []
    _each(lambda x: given.append(x), (args, *kwargs.values()))
    here = [x for x in given if isinstance(x, Pretend)]
    elsewhere = [x for x in given if not isinstance(x, Pretend)]
    target = kwargs.get("device")
    kind = None if target is None else torch.device(target).type
    if here and name not in MIXING and (strange := [tuple(x.shape) for x in elsewhere if x.dim()]):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name}, "
            f"on the CPU {strange}) at {_where()}"
        )
    if name == "aten::_fused_sdp_choice" and here:
        return 0  # the kernel of plain mathematics
    if _waits(name, args, here, kind):
        waits[_where()] += 1
    a = _each(_inside, args) if here else args
    k = {key: _each(_inside, value) for key, value in kwargs.items() if key != "pin_memory"}
    if kind == "cuda":
        k["device"] = torch.device("cpu")
    result = _computed(func, name, a, k)
    lands = isinstance(args[0], Pretend) if name == "aten::copy_" else kind == "cuda" or (here and kind is None)
    known = {id(x.inner): x for x in here}
    kept = set() if kind == "cuda" else {id(x) for x in elsewhere}

    def wrap(x):
        if id(x) in kept or isinstance(x, Pretend):
            return x
        return known.get(id(x)) if id(x) in known else Pretend(x) if lands else x

    return _each(wrap, result)


def _inside(x: torch.Tensor) -> torch.Tensor:
    return x.inner if isinstance(x, Pretend) else x


def _each(change, x):
    """Return ``x`` with every tensor in it changed, as PyTorch's ``tree_map``, which takes longer than operations do.

    Args:
        x: what operations take and give: tensors, numbers, and lists and tuples of these.
    """
    if isinstance(x, torch.Tensor):
        return change(x)
    return type(x)(_each(change, one) for one in x) if type(x) in (list, tuple) else x


def _waits(name: str, args, here: list, kind: str | None) -> bool:
    if name in INDEXING and here:
        return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "aten::copy_":
        return isinstance(args[1], Pretend) and not isinstance(args[0], Pretend)
    return bool(here) and (name in WAITING or (name == "aten::_to_copy" and kind == "cpu"))


def _computed(func, name: str, a, k):
    if name == "aten::histc" and not a[0].is_floating_point():  # CUDA counts integers
        return func(a[0].float(), *a[1:], **k).to(a[0].dtype)
    if name == "aten::mm" and func._schema.overload_name.startswith("dtype"):  # half precision into fp32
        return a[0].to(a[2]) @ a[1].to(a[2])
    return func(*a, **k)


@functools.cache
def _put_guard() -> None:
    """Compile and load the guard; skip the test where there is no compiler."""
    torch_folder = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    places = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    with tempfile.TemporaryDirectory(prefix="rankfold-guard-") as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD, encoding="utf-8")
        command = ["c++", *flags, str(source), "-o", str(library), *places]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no C++ compiler (c++), which a pretend device needs")
        assert done.returncode == 0, done.stderr
        CDLL(str(library)).put_guard()


@contextlib.contextmanager
def pretend_device() -> Iterator[None]:
    """Have rankfold take ``cuda`` for a device that is there."""
    _put_guard()
    properties = types.SimpleNamespace(total_memory=MEMORY)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(
        True
    )  # .data of a plain tensor cannot become one of ours
    torch._C._set_only_lift_cpu_tensors(True)
    waits.clear()
    try:
        # Other kernels of a PyTorch that was built for CUDA ask its driver, which may not be there.
        formula, one_thread = sdpa_kernel(SDPBackend.MATH), torch.autograd.set_multithreading_enabled(False)
        with pytest.MonkeyPatch.context() as patch, _Mode(), one_thread, formula:
            for name, value in {
                "_lazy_init": lambda: None,
                "get_device_capability": lambda *_: (9, 0),
                "get_device_name": lambda *_: "a pretend device",
                "get_device_properties": lambda *_: properties,
                "mem_get_info": lambda *_: (MEMORY, MEMORY),
                "max_memory_allocated": lambda *_: 0,
            }.items():
                patch.setattr(torch.cuda, name, value)
            for name, value in {
                "is_available": lambda: True,
                "current_accelerator": lambda **_: CUDA,
                "device_count": lambda: 1,
                "synchronize": lambda *_: None,
            }.items():
                patch.setattr(torch.accelerator, name, value)
            patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(before)
