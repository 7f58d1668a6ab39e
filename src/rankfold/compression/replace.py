"""Replace modules of a block by the smaller ones a method computed."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..architectures import FROM_CONFIG, BlockView, from_config
from ..errors import NumericsError
from ..methods import BlockResult
from ..models.dense_model import DenseModel
from ..models.weights import as_computed
from ..modules import build


def replace(view: BlockView, result: BlockResult, source: DenseModel) -> BlockView:
    """Put the result's modules into the block, with weights rounded as they will be stored.

    Returns:
        The block as it is now; the same one, unless the block itself was replaced, as path ``""``.
    """
    if "" in result.modules:
        with torch.device("meta"):
            module = build(result.modules[""], view.module, view.config)
        view = dataclasses.replace(view, module=module.eval())
    for path in sorted(filter(None, result.modules)):
        _put_one(view, result, path, source)
    for key, tensor in result.state.items():
        # of the block itself, or of a module that an earlier stage replaced
        if not any(key.startswith(path + ".") for path in result.modules):
            owner, _, name = key.rpartition(".")
            computed = nn.Parameter(_checked(key, tensor, source), requires_grad=False)
            setattr(view.module.get_submodule(owner), name, computed)
    if missing := [name for name, parameter in view.module.named_parameters() if parameter.is_meta]:
        raise NumericsError(f"{view.path} was not computed completely: {', '.join(missing)} missing")
    return view


def _put_one(view: BlockView, result: BlockResult, path: str, source: DenseModel) -> None:
    spec, (parent, _, name) = result.modules[path], path.rpartition(".")
    owner = view.module.get_submodule(parent)
    with torch.device("meta"):
        built = from_config if spec["kind"] == FROM_CONFIG else build
        module = built(spec, getattr(owner, name), view.config)
    # What it takes over, and what a later stage has replaced in it, have their own.
    others = (*spec.get("adopt", {}), *(x.removeprefix(f"{path}.") for x in result.modules if x.startswith(f"{path}.")))
    others = tuple(f"{other}." for other in others)
    state = {
        inside: _checked(key, tensor, source)
        for key, tensor in result.state.items()
        if key.startswith(path + ".") and not (inside := key.removeprefix(path + ".")).startswith(others)
    }
    missing = module.load_state_dict(state, strict=False, assign=True).missing_keys
    if any(not key.startswith(others) for key in missing):
        raise NumericsError(f"{view.path}.{path} was not computed completely: {', '.join(missing)} missing")
    setattr(owner, name, module.eval())


@contextlib.contextmanager
def replaced(view: BlockView, result: BlockResult, source: DenseModel) -> Iterator[None]:
    """Have the result's modules in the block for a while."""
    with swapped(view.module, {path: view.module.get_submodule(path) for path in result.modules}):
        replace(view, result, source)
        yield


@contextlib.contextmanager
def swapped(block: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Have other modules at these paths of a block for a while."""
    before = {path: block.get_submodule(path) for path in modules}
    try:
        _put(block, modules)
        yield
    finally:
        _put(block, before)


def _put(block: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        setattr(block.get_submodule(parent), name, module)


class _Passing(nn.Module):
    """Stands where a block was removed."""

    def forward(self, hidden, *args, **kwargs):
        return hidden


def passing(view: BlockView) -> BlockView:
    """Return a removed block: its output is its input."""
    return dataclasses.replace(view, module=_Passing())


class _InOtherCoordinates(nn.Module):
    """Stands around a block that reads or writes the stream in other coordinates than the model's.

    Args:
        before, behind: ``(D, r)`` orthonormal coordinates of what it reads and writes; ``None``: the model's.
    """

    def __init__(self, block: nn.Module, before: Tensor | None, behind: Tensor | None):
        super().__init__()
        self.block, self.before, self.behind = block, before, behind

    def forward(self, hidden, *args, **kwargs):
        output = self.block(hidden if self.before is None else _turned(hidden, self.before), *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        return output if self.behind is None else _turned(output, self.behind.T)


def _turned(x: Tensor, Q: Tensor) -> Tensor:
    """Return ``x Q`` in the dtype of ``x``, multiplied in fp32 whatever surrounds it: no block of the model does it."""
    with torch.autocast(x.device.type, enabled=False):
        return (x.float() @ Q.to(x.device, torch.float32)).to(x.dtype)


def in_model_coordinates(view: BlockView, behind: Tensor | None) -> BlockView:
    """Return a block between two streams in the model's coordinates, whatever it reads (``view.basis``) and writes."""
    if view.basis is None and behind is None:
        return view
    return dataclasses.replace(view, module=_InOtherCoordinates(view.module, view.basis, behind))


def _checked(name: str, tensor: Tensor, source: DenseModel) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise NumericsError("a factor has NaN or infinite entries; raise the ridge or use more calibration tokens")
    return as_computed(name, tensor, source.dtype, source.compute_dtype).to(source.device)
