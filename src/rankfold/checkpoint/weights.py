"""Tensors of a safetensors checkpoint, read by name when they are wanted."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..architectures import architecture_of
from ..errors import CheckpointError, NumericsError, first_line
from ..linalg.psd import all_finite

__all__ = ["Weights", "check_finite", "fill_outer", "required_names"]


class Weights:
    """Tensors of a safetensors checkpoint by parameter name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = _tensor_files(folder)

    def rename(self, prefix: str, wanted: set[str]) -> bool:
        """Match checkpoint names to the model's, with or without the base model's prefix; False where they differ."""
        for change in (str, lambda n: f"{prefix}.{n}", lambda n: n.removeprefix(f"{prefix}.")):
            renamed = {change(name): (file, name) for name, (file, _) in self.files.items()}
            if wanted <= set(renamed):
                self.files = renamed
                return True
        return False

    def read(self, names: list[str], storage_dtype: torch.dtype, dtype: torch.dtype, device) -> dict[str, torch.Tensor]:
        """Tensors by name; floats are rounded to ``storage_dtype``, the precision of the result, and held as ``dtype``."""
        state = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name][0], []).append(name)
        for file, here in by_file.items():
            with _open(file) as handle:
                for name in here:
                    tensor = handle.get_tensor(self.files[name][1])
                    state[name] = (tensor.to(storage_dtype).to(dtype) if tensor.is_floating_point() else tensor).to(
                        device
                    )
        return state

    def fill(self, module: nn.Module, prefix: str, storage_dtype: torch.dtype, dtype: torch.dtype, device) -> None:
        """Replace all meta tensors of ``module`` by those of the files; see :meth:`read`."""
        state = self.read([prefix + name for name in module.state_dict()], storage_dtype, dtype, device)
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()}, assign=True)


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({first_line(error)}); download or copy it again"
        ) from error


def _tensor_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> (file, name in the file)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            mapping = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{index} is damaged ({first_line(error)}); download or copy it again") from error
        missing = sorted({file for file in mapping.values() if not (folder / file).exists()})
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)} named by its index; download or copy it again")
        return {name: (folder / file, name) for name, file in mapping.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(
            f"{folder} has no model.safetensors; rankfold reads safetensors and GGUF only (a pickle may run code). "
            "Convert it with save_pretrained"
        )
    with _open(single) as handle:
        return {name: (single, name) for name in handle.keys()}  # noqa: SIM118 - not a dict


def required_names(model: nn.Module) -> set[str]:
    return set(model.state_dict()) - set(getattr(model, "all_tied_weights_keys", None) or {})


def fill_outer(model: nn.Module, weights: Weights, storage_dtype: torch.dtype, device: torch.device) -> None:
    """Load what is not in the blocks, and tie the head."""
    prefix = architecture_of(model).blocks + "."
    outer = [name for name in required_names(model) if not name.startswith(prefix)]
    state = weights.read(sorted(outer), storage_dtype, model.dtype, device)
    check_finite(state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():  # non-persistent buffers (rotary tables) were made on the CPU
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[key] = buffer.to(device)


def check_finite(state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericsError(f"weight {name} has {bad} NaN or infinite entries; the checkpoint is damaged")
