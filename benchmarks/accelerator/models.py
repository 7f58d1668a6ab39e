"""Models by shape: random weights with falling spectra and uneven columns, made on the device and written by block."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn

import common
from rankfold import CalibrationData, DenseModel
from rankfold.architectures import BlockView

from .bench import Bench

# Width, hidden units, blocks, heads, key/value heads.
SHAPES = {
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "70b": (8192, 28672, 80, 64, 8),
    "tiny": (64, 96, 3, 4, 2),
}
VOCABULARY = 32000
RANK = 512  # of the part of a weight whose spectrum falls


def config_of(shape: str, blocks: int | None = None) -> transformers.LlamaConfig:
    """Return the config of a Llama of a shape, with so many of its blocks."""
    width, hidden, depth, heads, kv_heads = SHAPES[shape]
    sizes = width, hidden, heads, kv_heads, blocks or depth, 256 if shape == "tiny" else VOCABULARY
    return common.llama(*sizes, max_position_embeddings=4096, dtype="bfloat16", architectures=["LlamaForCausalLM"])


def depth_of(shape: str) -> int:
    return SHAPES[shape][2]


def random_weight(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return a bf16 weight: ones of a norm; else ``(out, in)`` with falling singular values and uneven columns."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    rows, columns = shape
    rank = min(RANK, rows, columns)
    falling = torch.arange(1, rank + 1, device=device) ** -0.5
    weight = (normal(rows, rank) * (falling / falling.norm())) @ normal(rank, columns)
    weight = (weight + 0.5 * normal(rows, columns)) * (0.5 * normal(columns)).exp()
    return weight.mul_(columns**-0.5 / weight.std() if weight.numel() < 2**28 else columns**-0.5).bfloat16()


def write_model(bench: Bench, shape: str, blocks: int | None = None) -> Path:
    """Write a model of random weights, one file for each block; one that is there already is kept."""
    config = config_of(shape, blocks)
    folder = bench.folder / f"{shape}-{config.num_hidden_layers}"
    if folder.exists():
        return folder
    config.save_pretrained(folder)
    with init_empty_weights():
        outline = transformers.LlamaForCausalLM(config)
    groups: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, tensor in outline.state_dict().items():
        groups.setdefault(name.split(".")[2] if ".layers." in name else "around", []).append((name, tensor.shape))
    generator, places = torch.Generator(bench.device).manual_seed(0), {}
    for number, names in enumerate(groups.values(), 1):
        tensors = {name: random_weight(size, generator, bench.device).cpu() for name, size in names}
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def random_ids(bench: Bench, vocabulary: int, samples: int, length: int) -> CalibrationData:
    """Return calibration samples of random tokens, an eighth more of them held out, eight at most."""
    held_out = max(1, min(8, samples // 8))
    ids = torch.randint(vocabulary, (samples + held_out, length), generator=torch.Generator().manual_seed(0))
    return CalibrationData(ids[:samples], "random", "random", 0, held_out=ids[samples:])


def random_block(bench: Bench, shape: str, *, batch: int, length: int) -> tuple[BlockView, Callable[[], object]]:
    """Return a block of a shape, on the meta device, and a call that makes a forward of one on the device, in bf16."""
    config = config_of(shape, 1)
    with init_empty_weights():
        outline = transformers.LlamaForCausalLM(config)
    view = DenseModel(outline, shape, torch.device("meta"), torch.bfloat16).meta_block(0)

    @torch.no_grad()
    def make() -> Callable[[], object]:
        generator = torch.Generator(bench.device).manual_seed(0)
        layer = view.module.__class__(config, 0).to(bench.device, torch.bfloat16)
        for parameter in layer.parameters():
            parameter.copy_(random_weight(parameter.shape, generator, bench.device))
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).to(bench.device)
        x = torch.randn(batch, length, config.hidden_size, device=bench.device).bfloat16()
        position = rotary(x, torch.arange(length, device=bench.device)[None])

        @torch.no_grad()
        def run() -> Tensor:
            return layer(x, position_embeddings=position)

        return run

    return view, make


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all parameters that a token reads: not the rows of the embedding, which it looks up."""
    return sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
