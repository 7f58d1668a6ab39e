"""The dense model, one block at a time.

A :class:`DenseModel` hands out decoder blocks with their weights in place, and everything around the blocks (embeddings,
final norm, head). Two kinds share it: weights streamed from safetensors, so that one block is resident at a time, and a
model that is in memory as a whole (a GGUF file, a checkpoint stored under other names, or a model the caller holds).
"""

import copy
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from .._utils.stopwatch import time_spent
from ..architectures import Architecture, BlockView, Part, own_frequencies, part_of
from ..errors import CheckpointError, OptionError, RankfoldError, first_line
from .auto_classes import auto_class
from .devices import DTYPES, autocast_dtype, resolve_device, resolve_dtype
from .fingerprint import fingerprint
from .given import check_given, check_quantised, check_tied, resolve_model
from .hub import commit_of, split_revision
from .tables import check_tables
from .tokenizer import TokenizerFiles
from .weights import Weights, check_finite, fill_outer
from .whole import check_unused, read_config, read_generation_config, read_gguf, read_whole, untie

__all__ = ["DenseModel", "open_model", "stored_dtype"]

log = logging.getLogger(__name__)


class DenseModel:
    """One stack of blocks in a dense model, read block by block.

    Attributes:
        name: what the user called it.  part: what of the model is taken.  config: of that part.  architecture: its family.
        model: the model around the blocks; the blocks of a streamed source are on the meta device.
        dtype: the dtype weights are written in, in the compressed model; what is read is rounded to it first, block by block.
        device: where blocks run.
        weights: where blocks are read from; ``None`` where all are in memory.
        tokenizer_files: where the tokenizer is read from when it is wanted; ``None`` where there is none.
        revision: commit on the hub; ``None`` where the model is from elsewhere.
        bytes_on_disk: of the files the weights are read from; ``None`` for a model that the caller holds.
        overlaps: read the next block and write the last one while this one is computed. It costs the memory of two blocks, and
            gains nothing where the processor that computes also reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        weights: Weights | None = None,
        tokenizer_files: TokenizerFiles | None = None,
        tokenizer=None,
        bytes_on_disk: int | None = None,
        part: Part | None = None,
        revision: str | None = None,
    ):
        self.model, self.name, self.device, self.dtype = model, name, device, dtype
        self.part = part or part_of(model)
        self.autocast = autocast_dtype(device)  # precision of block forwards; None for the compute dtype itself
        self.weights, self.tokenizer_files, self.bytes_on_disk = weights, tokenizer_files, bytes_on_disk
        self.overlaps = device.type != "cpu"
        self._tokenizer, self.revision = tokenizer, revision

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
        """What embeds a batch and runs the blocks: the model itself where it writes text, an encoder without its head, what
        owns a projector."""
        return self.model.get_submodule(self.part.network)

    def forward(self, batch: torch.Tensor | Mapping[str, torch.Tensor], **options):
        """What the network makes of a batch.

        Args:
            batch: ``(B, T)`` token ids, or ``(B, C, H, W)`` pixels as its image processor gives them; or all inputs by name, as
                the processor of a model of images and text gives them, or as a tower for images of any size takes them.
            options: of the network's own forward.
        """
        options |= {"use_cache": False} if self.architecture.decoder else {}
        given = {self.part.input_name: batch} if isinstance(batch, torch.Tensor) else batch
        given = {name: tensor.to(self.device) for name, tensor in given.items()}
        sees = self.architecture.projects and not self.part.packed  # Qwen-VL's tower has its projector inside
        return self._see(**given) if sees else self.network(**given, **options)

    def _see(self, pixel_values: torch.Tensor):
        """What owns a projector sends images through the tower in front of it. Some ask for the sizes of images that were cut
        into several; these were not."""
        see = self.network.get_image_features
        sizes = inspect.signature(see).parameters.get("image_sizes")
        wanted = sizes is not None and sizes.default is inspect.Parameter.empty
        return see(pixel_values, **({"image_sizes": [tuple(x.shape[1:]) for x in pixel_values]} if wanted else {}))

    @property
    def image_token(self) -> int | None:
        """Id of the token in whose places images stand among the tokens; ``None`` where this part sees no images."""
        return getattr(self.model.config, "image_token_id", None) if self.architecture.decoder else None

    @property
    def streamed(self) -> bool:
        """Whether blocks are read one at a time, instead of all being in memory."""
        return self.weights is not None

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.architecture.blocks)
        return nn.ModuleList([found]) if self.architecture.projects else found

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def context_length(self) -> int:
        return self.part.positions or 2048

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to use and to save."""
        return self._tokenizer is not None or (self.tokenizer_files is not None and self.tokenizer_files.exist)

    @property
    def tokenizer(self):
        """The model's tokenizer.

        Raises:
            CheckpointError: there is none beside the weights.
        """
        if self._tokenizer is None:
            if self.tokenizer_files is None:
                raise CheckpointError(f"{self.name} came without a tokenizer; pass token ids instead of text")
            self._tokenizer = self.tokenizer_files.load()
        return self._tokenizer

    def with_tokenizer(self, tokenizer) -> "DenseModel":
        """Return the same open model, read by another tokenizer, or by that of a processor."""
        other = copy.copy(self)
        other._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        return other

    @property
    def image_processor(self):
        """What makes pixels of images for this model.

        Raises:
            CheckpointError: there is none beside the weights.
        """
        if self.tokenizer_files is None:
            raise CheckpointError(f"{self.name} came without an image processor; pass one as tokenizer, or pixels")
        return self.tokenizer_files.load_image_processor()

    @property
    def processor(self):
        """What makes the inputs of a model of images and text.

        Raises:
            CheckpointError: there is none beside the weights.
            OptionError: it needs a package that is not installed.
        """
        if self.tokenizer_files is None:
            raise CheckpointError(f"{self.name} came without a processor; pass one as tokenizer")
        return self.tokenizer_files.load_processor()

    @time_spent("reading")
    def block(self, index: int) -> BlockView:
        """A private copy of block ``index`` with its weights on :attr:`device`, released with the last reference.

        Raises:
            NumericsError: a weight is NaN or infinite (named).
            CheckpointError: the weights cannot be read.
        """
        module = copy.deepcopy(self.blocks[index])  # the caller may change it; a streamed block is empty here
        prefix = f"{self.architecture.path_of(index)}."
        if self.weights:
            self.weights.fill(module, prefix, self.dtype, self.compute_dtype, self.device)
        elif self.dtype != self.compute_dtype:
            module.to(self.dtype).to(self.compute_dtype)  # rounded as it will be stored
        module.to(self.device).eval()
        check_finite({prefix + name: tensor for name, tensor in module.state_dict().items()})
        return BlockView(self.architecture, index, module, self.config, self.inv_freq(index))

    def inv_freq(self, index: int) -> torch.Tensor | None:
        """Rotary frequencies of a block; families with sliding layers keep one table per layer type."""
        base = self.architecture.attention.rotary_base
        if base is not None:
            return own_frequencies(base, self.config.rotary_dim).to(self.device)
        owner = self.architecture.blocks.rpartition(".")[0]  # other parts have tables of their own
        for module in self.model.get_submodule(owner).modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                kind = getattr(self.config, "layer_types", None)
                named = getattr(module, f"{kind[index]}_inv_freq", None) if kind else None
                return named if named is not None else getattr(module, "inv_freq", None)
        return None

    def meta_block(self, index: int) -> BlockView:
        """Block ``index`` for reading shapes only; its weights may be on the meta device."""
        return BlockView(self.architecture, index, self.blocks[index], self.config)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What blocks run in: fp32 (under autocast) on CPUs and where they were de-quantised, a caller's model as it is,
        otherwise the dtype they are written in.
        """
        return self.model.dtype

    def whole_model(self) -> nn.Module:
        """The model with every block resident, for generating with it.

        Raises:
            CheckpointError: the weights cannot be read.
        """
        if self.weights is None:
            return self.model.to(self.device)
        return read_whole(self.weights.folder, self.model.config, self.dtype, self.device).eval()

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Tensors outside the blocks, as stored; a tied head is left out."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        prefix = self.architecture.blocks + "."
        return {
            name: tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.model.state_dict().items()
            if not name.startswith(prefix) and name not in tied
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the part's config and all weights; the same in whatever dtype the result is to be stored."""
        return fingerprint(self.config.to_diff_dict(), self._all_tensors())

    def _all_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and saved buffer once, as the checkpoint has it, by name."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        for name, tensor in sorted(self.model.state_dict().items()):
            if name not in tied:
                yield name, self.weights.raw(name) if self.weights else tensor


def open_model(
    model: "str | Path | nn.Module",
    *,
    dtype: str = "auto",
    device: str = "auto",
    tokenizer=None,
    part: str | None = None,
    revision: str | None = None,
) -> DenseModel:
    """Open a model for compression.

    Args:
        model: hub id (``owner/name``, or ``owner/name@revision``), local folder, local ``.gguf`` file, or a transformers model
            already in memory.
        dtype: ``float32``, ``bfloat16`` or ``float16``: what the result is written in; ``auto`` is as the checkpoint stores
            it, and ``bfloat16`` for a ``.gguf`` file, whose few bits fp32 would only make longer.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        tokenizer: overrides the one beside the weights.
        part: ``language``, ``vision`` or ``projector`` of a model that has several; by default the part that writes text, or
            else the only one.
        revision: of a hub id: branch, tag or commit.

    Raises:
        CheckpointError, UnsupportedModelError, OptionError: with one line saying what to do.
    """
    where, wanted = resolve_device(device), resolve_dtype(dtype)
    if isinstance(model, nn.Module):
        stack = check_given(model, part)
        check_tied(model)
        if revision is not None:
            raise OptionError(f"a revision is of a hub id, and the model is in memory, got {revision!r}; leave it out")
        place, commit = getattr(model, "name_or_path", ""), getattr(model.config, "_commit_hash", None)
        files = TokenizerFiles(Path(place), revision=commit) if place else None
        name = place or type(model).__name__
        return DenseModel(model, name, where, model.dtype, None, files, tokenizer, part=stack, revision=commit)
    path = resolve_model(model, revision)
    is_here = Path(str(model)).expanduser().exists()
    name = path.name if is_here else split_revision(str(model))[0]  # no local paths in results
    read = _read_gguf if path.is_file() else _read_folder
    network, storage_dtype, weights, size, stack = read(path, where, wanted, part)
    files, commit = TokenizerFiles.beside(path), commit_of(path)
    source = DenseModel(network, name, where, storage_dtype, weights, files, tokenizer, size, stack, commit)
    if not len(source):
        raise CheckpointError(f"{name} has no blocks by its config; correct num_hidden_layers in config.json")
    return source


def _dense_config(folder: Path):
    config = read_config(folder)
    check_quantised(config, str(folder))
    return config


def _read_gguf(file: Path, device: torch.device, dtype: torch.dtype | None, part: str | None):
    """As :func:`_read_folder`. All numbers are held in fp32, so that the fingerprint does not depend on the dtype written."""
    written = dtype or torch.bfloat16
    log.info("%s is de-quantised; its weights are written in %s", file.name, str(written).removeprefix("torch."))
    model = read_gguf(file, torch.float32).to(device)
    return model, written, None, file.stat().st_size, part_of(model, part)


def _read_folder(folder: Path, device: torch.device, dtype: torch.dtype | None, part: str | None):
    """The model around its blocks, the dtype weights are written in, where blocks are read from, bytes on disk, and the part
    that is taken."""
    config, weights = _dense_config(folder), Weights(folder)
    size = weights.bytes_on_disk
    weights.check_config(config)
    storage_dtype = dtype or stored_dtype(config, weights)
    with torch.device("meta"):  # before anything is as large as the config says
        outline = _empty(config, storage_dtype)
    check_quantised(config, str(folder), part_of(outline, part).architecture.blocks)
    named_alike = weights.match(outline)
    weights.check_fits(outline)
    check_tables(outline)
    model = _empty(config, torch.float32 if device.type == "cpu" else storage_dtype)
    stack = part_of(model, part)
    if named_alike:
        if any(weights.differ(*pair) for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items()):
            untie(config, str(folder))
            model = _empty(config, model.dtype)
        check_unused(weights.unused(model), model, folder)
        fill_outer(model, stack.architecture.blocks, weights, storage_dtype, device)
    else:
        log.info(
            "the checkpoint names its weights differently from the model: reading it as a whole, not block by block"
        )
        model, weights = read_whole(folder, config, storage_dtype, device), None
    if found := read_generation_config(folder):
        model.generation_config = found
    return model, storage_dtype, weights, size, stack


def stored_dtype(config, weights: Weights) -> torch.dtype:
    """Return the dtype in which transformers' ``dtype="auto"`` holds a checkpoint: its config's, or else its tensors'.

    Raises:
        CheckpointError: it is not one of the dtypes that can be written.
    """
    stored = config.dtype or weights.dtype
    if stored not in DTYPES.values():
        named = f"{weights.folder / 'config.json'} names" if config.dtype else f"the tensors in {weights.folder} have"
        raise CheckpointError(
            f"{named} the dtype {str(stored).removeprefix('torch.')}, which is not one of {', '.join(DTYPES)}; choose one of "
            "these with --dtype"
        )
    return stored


def _empty(config, dtype: torch.dtype):
    try:
        with init_empty_weights(include_buffers=False):
            return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except RankfoldError:
        raise
    except Exception as error:  # settings that no model can be built from end in whatever type meets them first
        raise CheckpointError(f"config.json describes no model that can be built ({first_line(error)})") from error
