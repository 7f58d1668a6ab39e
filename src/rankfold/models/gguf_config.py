"""What transformers overlooks in a GGUF file, as the config of the model says it: rotary frequencies that are not
plain, biases of a Llama, how wide the heads of a Qwen are, and what scores of a Gemma 3 are divided by.

Shape legend: N rotary dimensions of a head.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .._utils.present import present
from ..errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import gguf

FACTORS = "rope_freqs.weight"  # what every frequency is divided by
OTHERS = ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {  # as all Llama 3 have it; what differs between them is the factor
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
READ_BY_TRANSFORMERS = ("gpt-oss",)
WIDTHS_OVERLOOKED = ("qwen2", "qwen3")  # where transformers takes the width of heads that the config class has


def gguf_config(file: Path) -> tuple[PreTrainedConfig, int, int]:
    """The config of the model in a GGUF file, and how many numbers there are in its biases (for :func:`check_biases`)
    and in all its tensors (for :func:`check_size`).

    All at once, because opening a file takes seconds: its vocabulary is parsed token by token.

    Raises:
        UnsupportedModelError: the file stretches rotary frequencies in a way that cannot be said in a config, or is an
            adapter.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    arch = present(reader.get_field("general.architecture")).contents()
    if arch == "deci":
        raise UnsupportedModelError(
            f"{file} has architecture deci, which llama.cpp runs and transformers does not read; take the folder that "
            "it was exported from, or export it as gguf"
        )
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if found := next((name for name in tensors if name.endswith((".lora_a", ".lora_b"))), None):
        raise UnsupportedModelError(
            f"{file} is an adapter without a model ({found}); merge it with `llama-export-lora` and give the merged "
            "file"
        )
    for name, tensor in BIASES.items():
        if tensor in tensors and hasattr(config, name):
            setattr(config, name, True)
    width = reader.get_field(f"{arch}.attention.key_length")
    if width and arch in WIDTHS_OVERLOOKED:
        config.head_dim = width.contents()
    if arch == "gemma3":
        config.query_pre_attn_scalar = gemma3_scalar(config)
        if base := reader.get_field("gemma3.rope.freq_base_swa"):
            config.rope_parameters["sliding_attention"]["rope_theta"] = base.contents()
    stretched = _stretched(config, reader, tensors, file)
    if stretched:
        _turning(config).update(stretched)
    biases = sum(tensor.n_elements for name, tensor in tensors.items() if name.endswith("bias"))
    return config, biases, sum(int(tensor.n_elements) for tensor in tensors.values())


def gemma3_scalar(config) -> int:
    """Return what llama.cpp divides the scores of a Gemma 3 by the root of, which no file says.

    It is the width of a head, but in the 27B model, known by its 62 blocks, the stream's width over the heads.
    """
    is_27b = config.num_hidden_layers == 62
    return config.hidden_size // config.num_attention_heads if is_27b else config.head_dim


def check_size(config: PreTrainedConfig, numbers: int, file: Path) -> None:
    """Raise :class:`CheckpointError` for a file of far fewer ``numbers`` than its config: they would be made first."""
    with torch.device("meta"):
        needed = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if needed > 2 * numbers:
        raise CheckpointError(
            f"{file} holds {numbers:,} numbers, and its config describes {needed:,}; download or copy it again, or "
            "take the folder of safetensors this file was made of"
        )


def _stretched(config, reader: "gguf.GGUFReader", tensors: dict, file: Path) -> dict:
    """Rotary parameters where frequencies are not plain."""
    arch = present(reader.get_field("general.architecture")).contents()
    if arch in READ_BY_TRANSFORMERS:
        return {}
    fields = {key: reader.get_field(f"{arch}.rope.scaling.{key}") for key in ("type", "factor")}
    kind, factor = (field.contents() if field else None for field in fields.values())
    other = [name for name in OTHERS if name in tensors]
    known = kind in (None, "none") or (kind == "linear" and _turning(config))
    if not known or other or (FACTORS in tensors and not _whole(config)):
        raise UnsupportedModelError(
            f"{file} stretches rotary frequencies by {', '.join(other) or (FACTORS if kind is None else repr(kind))}, "
            "which is read of safetensors only; take the folder of safetensors this file was made of"
        )
    if FACTORS in tensors:
        return _by(torch.from_numpy(tensors[FACTORS].data.copy()).double(), config)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor else {}


def _turning(config) -> dict:
    """Rotary parameters of the layers that are stretched: in Gemma 3 not those with a window; empty without any."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention", found)
    return found if "rope_theta" in found else {}


def _whole(config) -> bool:
    """Whether all layers turn whole heads by the same frequencies."""
    found = _turning(config)
    return found is getattr(config, "rope_parameters", None) and found.get("partial_rotary_factor", 1.0) == 1.0


def _by(factors: Tensor, config) -> dict:
    """Rotary parameters that divide frequencies by a factor ``(N / 2,)``: Llama 3's where they fit, else LongRoPE's."""
    llama3 = LLAMA3 | {"rope_theta": config.rope_parameters["rope_theta"], "factor": factors.max().item()}
    if factors.max() > 1 and torch.allclose(_factors(llama3, config), factors, rtol=1e-4):
        return llama3
    return longrope(factors, config)


def longrope(factors: Tensor, config) -> dict:
    """Rotary parameters with which every frequency is divided by a factor ``(N / 2,)``, at any length of text.

    LongRoPE (arXiv:2402.13753) has factors for short and for long texts, here the same, and multiplies scores by
    another, here 1.
    """
    each = factors.tolist()
    return {
        "rope_type": "longrope",
        "short_factor": each,
        "long_factor": each,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _factors(parameters: dict, config) -> Tensor:
    """``(N / 2,)`` what these rotary parameters divide the plain frequencies by."""
    there = config.rope_parameters
    try:
        config.rope_parameters = parameters
        found = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))[0].double()
    finally:
        config.rope_parameters = there
    return parameters["rope_theta"] ** -(torch.arange(len(found)) / len(found)) / found


def check_biases(model: nn.Module, there: int, file: Path) -> None:
    """Raise :class:`CheckpointError` where a file has more bias numbers (``there``) than the model has places for."""
    found = sum(tensor.numel() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    if there > found:
        raise CheckpointError(
            f"{file} has {there} numbers in biases and the model that transformers makes of it {found}; take the "
            "folder of safetensors this file was made of"
        )
