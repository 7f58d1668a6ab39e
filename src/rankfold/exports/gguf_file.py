"""A padded model as one GGUF file, for llama.cpp and what is built on it.

Shape legend: H heads, N width of a head.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._utils.progress import track
from ..architectures import AttentionView
from ..compression.verify import Probe
from ..data.calibration_data import CalibrationData
from ..linalg.block_rounding import Rounded
from ..models.dense_model import DenseModel
from ..models.gguf_config import FACTORS
from ..models.whole import read_gguf
from .form import StockModel
from .gguf_blocks import packed
from .gguf_layout import Layout
from .llama_cpp import DECI
from .padding import padded_state
from .rounding import BlockRounding

TURNED = ("self_attn.q_proj", "self_attn.k_proj")  # whose rows `llama` and `deci` want pair by pair


def write_gguf(
    source: DenseModel,
    form: StockModel,
    file: Path,
    probe: Probe,
    *,
    dtype: str,
    base: str,
    tokens: CalibrationData | None = None,
) -> float:
    """Write a GGUF file and read it back: of its family where all MLPs are equally wide, otherwise ``deci``.

    Args:
        dtype, base: see :class:`.gguf_layout.Layout`.
        tokens: text that the blocks are rounded for, in the dtypes of :data:`.gguf_blocks.ROUNDED`. In others every
            number is rounded by itself.

    Returns and raises what :func:`~.folder.write_folder` does.
    """
    layout, names = Layout(source, form, dtype, base), {}
    writer, attention = layout.writer(file), layout.turned
    rounding = BlockRounding(form, source.outer_state(), tokens, layout.kind_of) if tokens else None
    for name, tensor in _tensors(source, form, layout.empty, probe, rounding):
        names[name] = layout.name_of(name)
        if isinstance(tensor, Rounded):
            stored = layout.kind_of(name, tensor.codes.shape)
            numbers = packed(Rounded(*(_ordered(name, part, attention) for part in tensor)), stored.name.lower())
        else:
            values = (_ordered(name, tensor, attention).float() + layout.offset_of(name)).contiguous().numpy()
            stored = layout.kind_of(name, values.shape)
            numbers = gguf.quants.quantize(values, stored)
        writer.add_tensor(names[name], numbers, raw_dtype=stored)
    if layout.factors is not None:
        writer.add_tensor(FACTORS, layout.factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if layout.arch is DECI:
        again: Any = _filled(file, layout.empty, attention, names)
    else:  # transformers reads these, settings included
        again = read_gguf(file, torch.float32)
        again.to(source.device)
    return probe.compare(DenseModel(again, file.name, source.device, torch.float32))


def _tensors(
    source: DenseModel, form: StockModel, empty: PreTrainedModel, probe: Probe, rounding: BlockRounding | None
) -> Iterator[tuple[str, Tensor | Rounded]]:
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
