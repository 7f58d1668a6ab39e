"""The dense model, one block at a time.

A :class:`Source` hands out decoder blocks with their weights in place, and everything around the blocks (embeddings,
final norm, head). Two kinds share it: weights streamed from safetensors, so that one block is resident at a time, and a
model that is in memory as a whole (a GGUF file, a checkpoint stored under other names, or a model the caller holds).
"""

import copy
import hashlib
import json
import logging
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..architectures import BlockView, architecture_for, architecture_of
from ..errors import CheckpointError, NumericsError, OptionError, UnsupportedModelError
from ..linalg.psd import all_finite

__all__ = ["Source", "Weights", "fill_outer", "open_model", "resolve_device", "resolve_dtype"]

log = logging.getLogger(__name__)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """bf16 on CPUs with AMX, where block forwards are 3 times faster in it; otherwise no autocast.

    AVX512-BF16 alone does not pay: products of bf16 take longer there than of fp32 (linear 25.5 ms against 19.5, attention 33
    against 22).
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return torch.bfloat16 if device.type == "cpu" and supported() else None


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_dtype(name: str) -> torch.dtype | None:
    """``torch.dtype`` of a name; ``None`` for ``auto`` (as the checkpoint stores it).

    Raises:
        OptionError: any other name.
    """
    if name == "auto":
        return None
    if _SHORT.get(name, name) not in DTYPES:
        raise OptionError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[_SHORT.get(name, name)]


def resolve_device(name: str) -> torch.device:
    """The device of ``cpu``, ``cuda[:i]``, ``mps`` or ``auto`` (an accelerator where there is one).

    Raises:
        OptionError: unknown name, or a device that is not available here.
    """
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return available or torch.device("cpu")
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise OptionError(f"device must be auto, cpu, cuda or mps; got {name!r}")
    if kind != "cpu" and (available is None or available.type != kind):
        raise OptionError(f"device {name!r} is not available here; use --device auto or cpu")
    return torch.device(name)


class Source:
    """A dense causal language model, read block by block.

    Attributes:
        name: what the user called it.  config: the model's config.  architecture: its family.
        model: the model around the blocks; the blocks of a streamed source are on the meta device.
        dtype: the dtype weights are stored in, on disk and in the compressed model.
        device: where blocks run.
    """

    def __init__(self, model: nn.Module, name: str, device: torch.device, dtype: torch.dtype, folder: "Weights | None"):
        self.model, self.name, self.device, self.dtype = model.eval(), name, device, dtype
        self.config = model.config.get_text_config()
        self.architecture = architecture_of(self.model)
        self.autocast = autocast_dtype(device)  # precision of block forwards; None for the compute dtype itself
        self._weights = folder
        self._tokenizer_args: tuple | None = None
        self._tokenizer = None
        self._fingerprint: str | None = None

    @property
    def streamed(self) -> bool:
        """Whether blocks are read one at a time, instead of all being in memory."""
        return self._weights is not None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.architecture.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def context_length(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or 2048

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to use and to save; a folder of weights alone has none."""
        if self._tokenizer is not None or self._tokenizer_args is None:
            return self._tokenizer is not None
        path, kwargs = self._tokenizer_args
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
        return bool(kwargs) or any((Path(path) / name).exists() for name in names)

    @property
    def tokenizer(self):
        """The model's tokenizer.

        Raises:
            CheckpointError: there is none beside the weights.
        """
        if self._tokenizer is None:
            if self._tokenizer_args is None:
                raise CheckpointError(f"{self.name} came without a tokenizer; pass token ids instead of text")
            path, kwargs = self._tokenizer_args
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"no tokenizer can be read from {path}: {_first_line(error)}; put the tokenizer files beside the weights"
                ) from error
        return self._tokenizer

    @property
    def processor_files(self) -> list[Path]:
        """What prepares images beside the weights of a model for images and text; it stays as it is."""
        folder = Path(self._tokenizer_args[0]) if self._tokenizer_args else None
        names = ("preprocessor_config.json", "processor_config.json")
        return [folder / name for name in names if (folder / name).is_file()] if folder else []

    def block(self, index: int) -> BlockView:
        """A private copy of block ``index`` with its weights on :attr:`device`, released with the last reference.

        Raises:
            NumericsError: a weight is NaN or infinite (named).
            CheckpointError: the weights cannot be read.
        """
        module = copy.deepcopy(self.blocks[index])  # the caller may change it; a streamed block is empty here
        prefix = f"{self.architecture.blocks}.{index}."
        if self._weights:
            self._weights.fill(module, prefix, self.dtype, self.compute_dtype, self.device)
        elif self.dtype != self.compute_dtype:
            module.to(self.dtype).to(self.compute_dtype)  # rounded as it will be stored
        module.to(self.device)
        _check_finite({prefix + name: tensor for name, tensor in module.state_dict().items()})
        return BlockView(self.architecture, index, module, self.config, self._inv_freq(index))

    def _inv_freq(self, index: int) -> torch.Tensor | None:
        """Rotary frequencies of a block; families with sliding layers keep one table per layer type."""
        for module in self.model.modules():
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
        """What blocks run in: the stored dtype on accelerators, fp32 (under autocast) on CPUs, a caller's model as it is."""
        return self.model.dtype

    def whole_model(self) -> nn.Module:
        """The model with every block resident, for generating with it.

        Raises:
            CheckpointError: the weights cannot be read.
        """
        if self._weights is None:
            return self.model.to(self.device)
        return _whole(self._weights.folder, self.dtype, self.device).eval()

    def outer_state(self) -> dict[str, torch.Tensor]:
        """Tensors outside the blocks, as stored; a tied head is left out."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        prefix = self.architecture.blocks + "."
        return {
            name: tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.model.state_dict().items()
            if not name.startswith(prefix) and name not in tied
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the config and the weights of the first and last block: tells models apart, not every edit."""
        if self._fingerprint is None:
            digest = hashlib.sha256(json.dumps(self.config.to_diff_dict(), sort_keys=True, default=str).encode())
            for index in {0, len(self) - 1}:
                for name, tensor in sorted(self.block(index).module.state_dict().items()):
                    digest.update(name.encode())
                    digest.update(tensor.detach().cpu().float().numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:32]
        return self._fingerprint


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

    def read(self, names: list[str], stored: torch.dtype, dtype: torch.dtype, device) -> dict[str, torch.Tensor]:
        """Tensors by name; floats are rounded to ``stored``, the precision of the result, and held as ``dtype``."""
        state = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name][0], []).append(name)
        for file, here in by_file.items():
            with _open(file) as handle:
                for name in here:
                    tensor = handle.get_tensor(self.files[name][1])
                    state[name] = (tensor.to(stored).to(dtype) if tensor.is_floating_point() else tensor).to(device)
        return state

    def fill(self, module: nn.Module, prefix: str, stored: torch.dtype, dtype: torch.dtype, device) -> None:
        """Replace all meta tensors of ``module`` by those of the files; see :meth:`read`."""
        state = self.read([prefix + name for name in module.state_dict()], stored, dtype, device)
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()}, assign=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({_first_line(error)}); download or copy it again"
        ) from error


def _tensor_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> (file, name in the file)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            mapping = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{index} is damaged ({_first_line(error)}); download or copy it again") from error
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


def _check_finite(state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericsError(f"weight {name} has {bad} NaN or infinite entries; the checkpoint is damaged")


def _locate(name: str) -> Path:
    """The folder of a local path or hub id.

    Raises:
        CheckpointError: no such folder, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"no model at {name!r}: expected a folder, a .gguf file, or a hub id such as owner/name")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
    copies = ["consolidated*", "original/*"]  # the same weights in the maker's own format
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=copies))
    except Exception as error:  # httpx, requests and hub errors share no base; all mean "not to be had"
        raise CheckpointError(
            f"cannot get {name!r} from the hub ({_first_line(error)}); check the name and the connection, or download it "
            "elsewhere and give the folder"
        ) from error


def open_model(model: "str | Path | nn.Module", *, dtype: str = "auto", device: str = "auto", tokenizer=None) -> Source:
    """Open a model for compression.

    Args:
        model: hub id, local folder, local ``.gguf`` file, or a transformers model already in memory.
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``: what the result is stored in.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        tokenizer: overrides the one beside the weights.

    Raises:
        CheckpointError, UnsupportedModelError, OptionError: with one line saying what to do.
    """
    where, wanted = resolve_device(device), resolve_dtype(dtype)
    if isinstance(model, nn.Module):
        _check_type(model.config)
        source = Source(model, getattr(model, "name_or_path", "") or type(model).__name__, where, model.dtype, None)
        if source.name != type(model).__name__:
            source._tokenizer_args = (source.name, {})
    else:
        path = _locate(str(model))
        source = _open_gguf(path, where, wanted) if path.suffix == ".gguf" else _open_folder(path, where, wanted)
        source.name = path.name if Path(str(model)).expanduser().exists() else str(model)  # no local paths in results
    source._tokenizer = tokenizer
    return source


def _read_config(folder: Path):
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no readable config.json ({_first_line(error)})") from error
    if getattr(config, "quantization_config", None):
        method = (
            dict(config.quantization_config).get("quant_method") if isinstance(config.quantization_config, dict) else ""
        )
        raise UnsupportedModelError(
            f"{folder} is already compressed or quantised ({method or 'quantization_config'}); start from the dense model"
        )
    _check_type(config)
    return config


def _check_type(config) -> None:
    architecture_for(config.get_text_config().model_type)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not one that transformers loads as a causal language model; give its "
            "language model alone"
        )


def _open_folder(folder: Path, device: torch.device, dtype: torch.dtype | None) -> Source:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is neither a folder nor a .gguf file")
    config = _read_config(folder)
    weights = Weights(folder)
    stored = dtype or config.get_text_config().dtype or torch.float32
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device.type == "cpu" else stored)
    if weights.rename(model.base_model_prefix, _required_names(model)):
        fill_outer(model, weights, stored, device)
        source = Source(model, str(folder), device, stored, weights)
    else:
        log.info(
            "the checkpoint names its weights differently from the model: reading it as a whole, not block by block"
        )
        source = Source(_whole(folder, stored, device), str(folder), device, stored, None)
    if (folder / "generation_config.json").exists():
        source.model.generation_config = GenerationConfig.from_pretrained(folder)
    source._tokenizer_args = (folder, {})
    return source


def _required_names(model: nn.Module) -> set[str]:
    return set(model.state_dict()) - set(getattr(model, "all_tied_weights_keys", None) or {})


def fill_outer(model: nn.Module, weights: Weights, stored: torch.dtype, device: torch.device) -> None:
    """Load what is not in the blocks, and tie the head."""
    prefix = architecture_of(model).blocks + "."
    outer = [name for name in _required_names(model) if not name.startswith(prefix)]
    state = weights.read(sorted(outer), stored, model.dtype, device)
    _check_finite(state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():  # non-persistent buffers (rotary tables) were made on the CPU
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[key] = buffer.to(device)


def _whole(folder: Path, dtype: torch.dtype, device: torch.device, **kwargs) -> nn.Module:
    load = torch.float32 if device.type == "cpu" else dtype
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=load, use_safetensors=True, **kwargs)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be loaded ({_first_line(error)})") from error
    return model.to(device)


def _open_gguf(file: Path, device: torch.device, dtype: torch.dtype | None) -> Source:
    """A GGUF file, de-quantised by transformers."""
    stored = dtype or torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32 if device.type == "cpu" else stored
        ).to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{file} cannot be read as GGUF ({_first_line(error)})") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are floats now; save_pretrained refuses otherwise
    model.hf_quantizer = None
    model.is_quantized = False
    source = Source(model, str(file), device, stored, None)
    source._tokenizer_args = (file.parent, {"gguf_file": file.name})
    return source
