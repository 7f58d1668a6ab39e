"""What stands in a GGUF file before its numbers: its architecture, its settings, and the type of every tensor.

So the size of a file is known before anything is compressed.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch

from .._utils.present import present
from ..architectures import AttentionView
from ..models.dense_model import DenseModel
from ..models.gguf_config import FACTORS
from ..models.weights import untied_state
from .form import StockModel
from .gguf_blocks import FORMATS, ROUNDED
from .gguf_tokens import write_tokenizer
from .llama_cpp import WINDOW, arch_of, context_of, frequency_factors, rotary_of

Kind = gguf.GGMLQuantizationType
FILE_TYPES = {"F32": "ALL_F32"} | {name: f"MOSTLY_{name}" for name in ("F16", "BF16", "Q8_0", "Q5_0", "Q4_0")}
FLOATS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
EMBEDDING = "token_embd.weight"


class Layout:
    """A file that is to be written.

    Args:
        source: the model it holds, or one with the same tokenizer and tensors around the blocks.
        form: that model in its stock class.
        dtype: of its matrices: ``float32``, ``float16``, ``bfloat16``, or one of :data:`.gguf_blocks.FORMATS`. Rows
            that are no whole blocks of 32 are in f16. Where blocks are rounded for text
            (:data:`.gguf_blocks.ROUNDED`), values of attention are one format finer, as is an embedding that is not
            the head, and what else stands around the blocks is in Q8_0.
        base: name of the dense model.

    Attributes:
        empty: the stock model, its parameters on the meta device.
        arch: llama.cpp's architecture.
        factors: see :func:`~.llama_cpp.frequency_factors`.
        turned: attention of a block where ``arch`` wants rows of queries and keys pair by pair; otherwise ``None``.
    """

    def __init__(self, source: DenseModel, form: StockModel, dtype: str, base: str):
        self.source, self.form, self.base = source, form, base
        self.empty, self.factors = form.empty(torch.float32), frequency_factors(form)
        self.arch = arch_of(form, self.factors)
        first = form.view(self.empty, 0)
        self.turned: AttentionView | None = first.attention if self.arch.rope_style == "gptj" else None
        self._kind = FLOATS[dtype] if dtype in FLOATS else Kind[dtype.upper()]
        self._values = self._embedding = self._around = self._kind
        if dtype in ROUNDED:
            self._around, self._values = Kind.Q8_0, Kind[FORMATS[dtype].finer.upper()]
            self._embedding = self._around if form.config.tie_word_embeddings else self._values
        self._path_of_values = f"{first.readers['attention_input'][-1]}.weight"
        self._names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.arch.name.upper()], len(source))

    def writer(self, file: Path) -> gguf.GGUFWriter:
        """Return what writes a file, its settings and tokenizer given and no tensor yet."""
        writer = gguf.GGUFWriter(file, self.arch.name)
        config, views = self.form.config, [self.form.view(self.empty, index) for index in range(len(self.source))]
        attention, widths = views[0].attention, [view.mlp.hidden for view in views]
        writer.add_type("model")
        writer.add_name(f"{self.base}, by rankfold")  # transformers reads a file named `mistral` in another way
        writer.add_block_count(len(views))
        writer.add_context_length(context_of(config))
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(widths if self.form.layers else widths[0])
        writer.add_head_count(attention.heads)
        writer.add_head_count_kv(attention.kv_heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
        writer.add_rope_dimension_count(attention.rotary_dim)
        writer.add_rope_freq_base(rotary_of(config)["rope_theta"])
        if self.arch.has_windows:
            _write_windows(writer, config)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[self._kind.name]])
        if self._kind not in FLOATS.values():
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        write_tokenizer(writer, self.source.tokenizer, self.source.config.vocab_size)
        return writer

    def name_of(self, name: str) -> str:
        """Return the name in the file of a tensor of transformers."""
        return present(self._names.get_name(name, (".weight", ".bias")))

    def offset_of(self, name: str) -> float:
        """Return what is added to a tensor of transformers: scales of norms are whole ones in a file."""
        norms = self.form.architecture.norms
        return norms.offset if norms and name.endswith("norm.weight") else 0.0

    def kind_of(self, name: str, shape: Sequence[int]) -> Kind:
        """Return the type in which a tensor of this name in transformers is written.

        Vectors are in fp32, as llama.cpp wants them; rows that are no whole number of blocks cannot be in blocks.
        """
        if len(shape) == 1:
            return Kind.F32
        if name.startswith(f"{self.form.architecture.blocks}."):
            kind = self._values if name.endswith(self._path_of_values) else self._kind
        else:
            kind = self._embedding if self.name_of(name) == EMBEDDING else self._around
        return kind if shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16


def _write_windows(writer: gguf.GGUFWriter, config) -> None:
    """The window of most blocks, their rotary frequencies, and the stretched ones of the others."""
    rotary = rotary_of(config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters[WINDOW]["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])


def file_size(layout: Layout) -> tuple[int, int]:
    """Return the bytes of a file: of what stands before its numbers, and of these."""
    shapes = {name: tuple(tensor.shape) for name, tensor in untied_state(layout.empty).items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "head")
        writer, numbers = layout.writer(file), 0
        given = {layout.name_of(name): (shape, layout.kind_of(name, shape)) for name, shape in shapes.items()}
        if layout.factors is not None:
            given[FACTORS] = layout.factors.shape, Kind.F32
        for name, (shape, kind) in given.items():
            block, size = gguf.GGML_QUANT_SIZES[kind]
            taken = math.prod(shape) // block * size
            writer.add_tensor_info(name, shape, np.dtype(np.float32), taken, raw_dtype=kind)
            numbers += _padded(taken)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return _padded(file.stat().st_size), numbers


def _padded(size: int) -> int:
    return gguf.GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT)
