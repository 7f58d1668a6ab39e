"""A padded model as one GGUF file, for llama.cpp and what is built on it.

Shape legend: H heads, N width of a head.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._utils.present import present
from .._utils.progress import track
from ..architectures import AttentionView
from ..compression.verify import Probe
from ..data.calibration_data import CalibrationData
from ..linalg.block_rounding import Rounded
from ..models.dense_model import DenseModel
from ..models.gguf_config import FACTORS
from ..models.whole import read_gguf
from .form import StockModel
from .gguf_blocks import FORMATS, packed
from .gguf_tokens import write_tokenizer
from .llama_cpp import DECI, arch_of, context_of, frequency_factors
from .padding import padded_state
from .rounding import BlockRounding

KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
FILE_TYPES = {"F32": "ALL_F32"} | {name: f"MOSTLY_{name}" for name in ("F16", "BF16", "Q8_0", "Q5_0", "Q4_0")}
EMBEDDING = "token_embd.weight"
TURNED = ("self_attn.q_proj", "self_attn.k_proj")  # whose rows `llama` and `deci` want pair by pair


def write_gguf(
    source: DenseModel,
    form: StockModel,
    file: Path,
    probe: Probe,
    *,
    quantised: str | None = None,
    tokens: CalibrationData | None = None,
) -> float:
    """Write a GGUF file and read it back: of its family where all MLPs are equally wide, otherwise ``deci``.

    Args:
        quantised: one of :data:`.gguf_blocks.FORMATS` for matrices; those whose rows are not whole blocks of 32 are
            written in f16.
        tokens: text that the blocks are rounded for; what stands around them is in Q8_0 then, but an embedding that
            is not the head as well, which is one format finer than the blocks. Without it every number is rounded by
            itself.

    Returns and raises what :func:`~.folder.write_folder` does.
    """
    empty, factors = form.empty(torch.float32), frequency_factors(form)
    arch = arch_of(form, factors)
    kind = gguf.GGMLQuantizationType[quantised.upper()] if quantised else KINDS[source.dtype]
    around = embedding = gguf.GGMLQuantizationType.Q8_0 if tokens else kind
    if tokens and not form.config.tie_word_embeddings:
        embedding = gguf.GGMLQuantizationType[FORMATS[present(quantised)].finer.upper()]
    attention, names = form.view(empty, 0).attention if arch.rope_style == "gptj" else None, {}
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.name.upper()], len(source))
    writer = gguf.GGUFWriter(file, arch.name)
    _write_settings(writer, source, form, empty, kind)
    write_tokenizer(writer, source.tokenizer, source.config.vocab_size)
    rounding = BlockRounding(form, source.outer_state(), tokens, present(quantised)) if tokens else None
    for name, tensor in _tensors(source, form, empty, probe, rounding):
        names[name] = known.get_name(name, (".weight", ".bias"))
        if isinstance(tensor, tuple):
            rounded, format = tensor
            stored = gguf.GGMLQuantizationType[format.upper()]
            numbers = packed(Rounded(*(_ordered(name, part, attention) for part in rounded)), format)
        else:
            values = _ordered(name, tensor, attention).float().contiguous().numpy()
            stored = _kind_of(values, embedding if names[name] == EMBEDDING else around)
            numbers = gguf.quants.quantize(values, stored)
        writer.add_tensor(names[name], numbers, raw_dtype=stored)
    if factors is not None:
        writer.add_tensor(FACTORS, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if arch is DECI:
        again: Any = _filled(file, empty, attention, names)
    else:  # transformers reads these, settings included
        again = read_gguf(file, torch.float32)
        again.to(source.device)
    return probe.compare(DenseModel(again, file.name, source.device, torch.float32))


def _write_settings(
    writer: gguf.GGUFWriter, source: DenseModel, form: StockModel, empty: PreTrainedModel, kind
) -> None:
    config, views = form.config, [form.view(empty, index) for index in range(len(source))]
    attention, widths = views[0].attention, [view.mlp.hidden for view in views]
    writer.add_type("model")
    writer.add_name(f"{source.name}, compressed")  # transformers reads a file whose name is `mistral` in another way
    writer.add_block_count(len(source))
    writer.add_context_length(context_of(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(widths if form.layers else widths[0])
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.rotary_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind.name]])
    if kind not in KINDS.values():
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _tensors(
    source: DenseModel, form: StockModel, empty: PreTrainedModel, probe: Probe, rounding: BlockRounding | None
) -> Iterator[tuple[str, Tensor | tuple[Rounded, str]]]:
    """Every tensor by its name in transformers, or what it is rounded to; the probe follows."""
    yield from source.outer_state().items()
    for index in track(range(len(source)), "exporting"):
        view = source.block(index)
        state: dict[str, Any] = padded_state(view, form.view(empty, index), source.dtype, form.places)
        if rounding:
            state |= rounding(index, state)
        for name, tensor in state.items():
            yield f"{view.path}.{name}", tensor
        probe.follow(view)


def _ordered(name: str, tensor: Tensor, attention: AttentionView | None, *, inverse: bool = False) -> Tensor:
    """Rows of queries and keys as ``llama`` and ``deci`` rotate them, ``p`` next to ``p + N / 2``; as they are without
    ``attention``."""
    if attention is None or not name.rpartition(".")[0].endswith(TURNED):
        return tensor
    halves = (attention.head_dim // 2, 2) if inverse else (2, attention.head_dim // 2)
    return tensor.unflatten(0, (-1, *halves)).transpose(1, 2).flatten(0, 2)


def _kind_of(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Vectors stay in fp32, as llama.cpp wants them; rows that are no whole number of blocks cannot be in blocks."""
    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    whole = values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if whole else gguf.GGMLQuantizationType.F16


def _filled(
    file: Path, empty: PreTrainedModel, attention: AttentionView | None, names: dict[str, str]
) -> PreTrainedModel:
    """The tensors in a file, in the model they were written for; its settings are not read."""
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    state = {}
    for name, named in names.items():
        values = gguf.quants.dequantize(there[named].data, there[named].tensor_type)
        tensor = torch.from_numpy(values.reshape(*reversed(there[named].shape.tolist())).copy())
        state[name] = _ordered(name, tensor, attention, inverse=True)
    empty.load_state_dict(state, strict=False, assign=True)
    empty.tie_weights()
    return empty
