"""What a checkpoint computes, and which damage may change it."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rankfold
from rankfold.calibration.runner import advance, outputs, start

IDS = torch.arange(24)[None] * 7 % 90
SETTINGS = "config.json"


def computed(folder: Path, *, by_block: bool = False) -> Tensor:
    """Logits of a checkpoint, read as a whole or, a dense one, block by block."""
    with torch.no_grad():
        if not by_block:
            return rankfold.load(folder, device="cpu")(IDS, use_cache=False).logits.float()
        source = rankfold.open_model(folder, device="cpu")
        stream = start(source, IDS, autocast=None)
        for index in range(len(source)):
            advance(source.block(index), stream)
        return outputs(source, IDS, stream).float()


def same(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and ((a - b).norm() <= tolerance * b.norm()).item()


def may_change(folder: Path, whole: Path, file: str, numbers: Tensor) -> bool:
    """Whether another model is what this damage of ``file`` makes, for everybody who reads it, with these logits.

    Other numbers in weights of the same names, shapes and kinds are other weights. Settings are another model where
    transformers finds every tensor it wants for them, uses every one there is, and computes the same.
    """
    if not numbers.isfinite().all():
        return False
    if file.endswith(".safetensors"):
        extra = _described(folder / file).items() - _described(whole / file).items()
        if whole.name == "tied" and {name for name, _ in extra} == {"lm_head.weight"}:
            return _stock_agrees(folder, numbers)  # a head of its own counts, whatever the config says
        return _described(folder / file) == _described(whole / file)
    if file != SETTINGS:
        return False
    now, before = (json.loads((place / file).read_text()) for place in (folder, whole))
    if "quantization_config" in before:  # what is described there was made by a program, and only by it
        return now.get("quantization_config") == before["quantization_config"] and not _structure(now, before)
    return _stock_agrees(folder, numbers)


STRUCTURE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
STRUCTURE += ("head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias")


def _structure(now: dict, before: dict) -> bool:
    return any(now.get(key) != before.get(key) for key in STRUCTURE)


def _described(file: Path) -> dict[str, tuple]:
    """Name -> shape and whether its numbers are floats."""
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    return {name: (tuple(tensor["shape"]), "F" in tensor["dtype"]) for name, tensor in header.items()}


def _stock_agrees(folder: Path, numbers: Tensor) -> bool:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return False
    with torch.no_grad():
        theirs = model.eval()(IDS, use_cache=False).logits.float()
    return same(numbers, theirs, 5e-2)  # these may be in half precision, if the config says so
