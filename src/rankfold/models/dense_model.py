"""The dense model, one block at a time.

A :class:`DenseModel` hands out decoder blocks with their weights in place, and everything around the blocks
(embeddings, final norm, head). Two kinds share it: weights streamed from safetensors, so that one block is resident at
a time, and a model that is in memory as a whole (a GGUF file, a checkpoint stored under other names, or a model the
caller holds).
"""

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .._utils.memory import has_room
from .._utils.stopwatch import time_spent
from ..architectures import Architecture, BlockView, Part, own_frequencies, part_of
from ..calibration.offload import Offload
from .devices import autocast_dtype, is_on
from .fingerprint import fingerprint
from .processors import Processors
from .weights import TensorReader, as_computed, as_written, check_finite, is_held, untied_state
from .whole import read_gguf, read_whole


class DenseModel:
    """One stack of blocks in a dense model, read block by block.

    Attributes:
        name: what the user called it.  part: what of the model is taken.  config: of that part.
        architecture: its family.
        model: the model around the blocks, on :attr:`device`. The blocks of a streamed source are on the meta device,
            others wherever they are kept.
        dtype: the dtype weights are written in, in the compressed model; what is read is rounded to it first, block by
            block.
        device: where blocks run.
        offload: where hidden states of the calibration samples are kept; ``None``: on the device.
        weights: where blocks are read from; ``None`` where all are in memory.
        processors: what makes its inputs, the tokenizer first.
        revision: commit on the hub; ``None`` where the model is from elsewhere.
        bytes_on_disk: of the weights in safetensors files, or of the ``.gguf`` file; ``None`` for a model that the
            caller holds.
        overlaps: read the next block and write the last one while this one is computed. It costs the host the memory of
            two blocks, so they have to fit, and gains nothing where the processor that computes also reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        weights: TensorReader | None = None,
        processors: Processors | None = None,
        bytes_on_disk: int | None = None,
        part: Part | None = None,
        revision: str | None = None,
    ):
        self.model, self.name, self.device, self.dtype = model, name, device, dtype
        self.part = part or part_of(model)
        # Precision of block forwards; None for the compute dtype itself. Autocast in bf16 cannot join tensors of fp16.
        self.autocast = autocast_dtype(device) if model.dtype != torch.float16 else None
        self.weights, self.bytes_on_disk, self.revision = weights, bytes_on_disk, revision
        self.processors = processors or Processors(name)
        self.offload: Offload | None = None
        self.overlaps = device.type != "cpu" and not self.is_resident and has_room(2 * self._largest_block)

    @property
    def architecture(self) -> Architecture:
        return self.part.architecture

    @architecture.setter
    def architecture(self, spec: Architecture) -> None:
        self.part = replace(self.part, architecture=spec)

    @property
    def config(self):
        return self.part.config

    @property
    def network(self) -> nn.Module:
        """Return what embeds a batch and runs the blocks: the model itself where it writes text, an encoder without its
        head, what owns a projector."""
        return self.model.get_submodule(self.part.network)

    @property
    def image_token(self) -> int | None:
        """Return the id of the token in whose places images stand; ``None`` where this part takes no images."""
        return getattr(self.model.config, "image_token_id", None) if self.architecture.decoder else None

    @property
    def streamed(self) -> bool:
        """Tell whether blocks are read one at a time, instead of all being in memory."""
        return self.weights is not None

    @property
    def is_resident(self) -> bool:
        """Tell whether all blocks are in the memory of :attr:`device` at once."""
        return not self.streamed and all(is_on(tensor, self.device) for tensor in self.blocks.parameters())

    @property
    def _largest_block(self) -> int:
        """Bytes."""
        return max((sum(x.nbytes for x in block.parameters()) for block in self.blocks), default=0)

    @property
    def blocks(self) -> nn.ModuleList:
        found: Any = self.model.get_submodule(self.architecture.blocks)
        return nn.ModuleList([found]) if self.architecture.is_projector else found

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def context_length(self) -> int:
        return self.part.positions or 2048

    @property
    def tokenizer(self):
        """Return the model's tokenizer; see :class:`~.processors.Processors`."""
        return self.processors.tokenizer

    def with_tokenizer(self, tokenizer) -> "DenseModel":
        """Return the same open model, read by another tokenizer, or by that of a processor."""
        other = copy.copy(self)
        other.processors = Processors(self.name, self.processors.files, tokenizer)
        return other

    @time_spent("reading")
    def block(self, index: int) -> BlockView:
        """Return a private copy of block ``index`` with its weights on :attr:`device`, released with the last
        reference.

        Raises:
            NumericsError: a weight is NaN or infinite (named).
            CheckpointError: the weights cannot be read.
        """
        return self.moved(index, self.read(index))

    def read(self, index: int) -> nn.Module:
        """Return a private copy of block ``index`` where its weights are kept; of a streamed one in host memory."""
        # Nobody changes the config that modules read: to copy it takes a fifth of the time of a small block.
        shared = {id(self.config): self.config}
        module = copy.deepcopy(self.blocks[index], shared)  # the caller may change it; a streamed block is empty here
        if self.weights:
            self.weights.fill(module, self._prefix(index), self.dtype, self.compute_dtype)
        else:
            for name, parameter in module.named_parameters():  # rounded as it will be stored
                parameter.data = as_computed(name, parameter.data, self.dtype, self.compute_dtype)
        return module

    def moved(self, index: int, module: nn.Module) -> BlockView:
        """Move what :meth:`read` returned to :attr:`device`; see :meth:`block`."""
        module.to(self.device, non_blocking=True).eval()
        check_finite({self._prefix(index) + name: tensor for name, tensor in module.state_dict().items()})
        return BlockView(self.architecture, index, module, self.config, self.inv_freq(index))

    def _prefix(self, index: int) -> str:
        return f"{self.architecture.path_of(index)}."

    def inv_freq(self, index: int) -> torch.Tensor | None:
        """Return the rotary frequencies of a block; families with sliding layers keep one table per layer type."""
        base = self.architecture.attention.rotary_base
        if base is not None:
            return own_frequencies(base, self.meta_block(index).attention.rotary_dim).to(self.device)
        owner = self.architecture.blocks.rpartition(".")[0]  # other parts have tables of their own
        for module in self.model.get_submodule(owner).modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                kind = getattr(self.config, "layer_types", None)
                named = getattr(module, f"{kind[index]}_inv_freq", None) if kind else None
                found = named if named is not None else getattr(module, "inv_freq", None)
                return None if found is None else found.to(self.device)
        return None

    def meta_block(self, index: int) -> BlockView:
        """Return block ``index`` for reading shapes only; its weights may be on the meta device."""
        return BlockView(self.architecture, index, self.blocks[index], self.config)

    def meta_blocks(self) -> list[BlockView]:
        """Return all blocks for reading shapes only; layers may differ in kind."""
        return [self.meta_block(index) for index in range(len(self))]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return what blocks run in: fp32 (under autocast) on CPUs and where they were de-quantised, a caller's model
        as it is, otherwise the dtype they are written in.
        """
        return self.model.dtype

    def whole_model(self) -> nn.Module:
        """Return the model with every block on :attr:`device`, for generating with it.

        Raises:
            CheckpointError: the weights cannot be read.
        """
        named = self.model.named_parameters()
        as_stored = self.dtype == self.compute_dtype and all(is_held(name, x, self.dtype) for name, x in named)
        if self.is_resident and as_stored:
            return self.model
        if self.weights is None or self.is_resident:
            whole = copy.deepcopy(self.model)
        elif self.weights.place.is_file():
            whole = read_gguf(self.weights.place, self.compute_dtype)
        else:
            whole = read_whole(self.weights.place, self.model.config, self.compute_dtype)
        if not as_stored:  # rounded as blocks are; tables of angles stay exact
            for name, weight in whole.named_parameters():
                weight.data = as_computed(name, weight.data, self.dtype, self.compute_dtype)
        return nn.Module.to(whole, self.device).eval()

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors outside the blocks, as they are stored; a tied head is left out."""
        prefix = self.architecture.blocks + "."
        return {
            name: as_written(name, tensor.detach().cpu(), self.dtype)
            for name, tensor in untied_state(self.model).items()
            if not name.startswith(prefix)
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the digest of the part's config and all weights; the same whatever dtype the result is stored in."""
        read = self.weights.raw if self.weights else None
        tensors = ((name, read(name) if read else tensor) for name, tensor in sorted(untied_state(self.model).items()))
        return fingerprint(self.config.to_diff_dict(), tensors)
