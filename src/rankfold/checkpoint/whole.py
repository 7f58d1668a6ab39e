"""Models that are read as a whole: GGUF files, and checkpoints stored under other names than the model class uses."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from ..errors import CheckpointError, first_line

__all__ = ["read_gguf", "read_whole"]


def read_whole(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A dense model from a folder of safetensors; on a CPU its numbers are held in fp32.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_held(dtype, device), use_safetensors=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be loaded ({first_line(error)})") from error
    return model.to(device)


def read_gguf(file: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A GGUF file, de-quantised by transformers; on a CPU its numbers are held in fp32.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=_held(dtype, device))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{file} cannot be read as GGUF ({first_line(error)})") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are floats now; save_pretrained refuses otherwise
    model.hf_quantizer = None
    model.is_quantized = False
    return model.to(device)


def _held(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else dtype
