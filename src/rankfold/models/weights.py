"""Tensors of a safetensors checkpoint, read by name when they are wanted."""

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from .._utils.reporting import reporting
from .._utils.sizes import plural
from ..errors import CheckpointError, NumericsError
from ..linalg.psd import all_finite
from .conversion import Place, Placed, converted

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of floats
# Biases that experts are chosen by. Checkpoints and transformers keep them in fp32: rounded to bf16 they choose others.
CHOOSING = re.compile(r"\b(e_score_correction_bias|expert_bias)$")
KNOWN = ("torch", "transformers")  # whose tensors hold the numbers they show, and linear layers compute with them
IN_LIST = re.compile(r"(.*?)\.\d+\..*\b(weight|bias)$")  # a weight of one of many equal modules, such as blocks


def as_written(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as it is written: floats in the model's dtype, what experts are chosen by in fp32, indices as
    they are."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32 if CHOOSING.search(name) else dtype)


def as_computed(name: str, tensor: torch.Tensor, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as it is computed with: rounded as it is written in ``dtype``, and held as ``compute_dtype``."""
    return as_written(name, as_written(name, tensor, dtype), compute_dtype)


def is_held(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a tensor has the dtype in which a model of ``dtype`` holds it."""
    kept = torch.float32 if CHOOSING.search(name) else dtype
    return tensor.dtype == kept or not tensor.is_floating_point()


def buffer_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Count the bytes of what is written of a module and is no parameter, such as biases that experts are chosen by."""
    state = module.state_dict(keep_vars=True)
    return sum(as_written(n, x, dtype).nbytes for n, x in state.items() if not isinstance(x, nn.Parameter))


class TensorReader:
    """Reads tensors by parameter name into host memory.

    Attributes:
        place: folder or file they lie in.
    """

    def __init__(self, place: Path):
        self.place = place

    def read(self, names: list[str], storage_dtype: torch.dtype, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Read tensors by name into host memory; floats are rounded to ``storage_dtype``, the precision of the result,
        and held as ``dtype``."""
        return {name: as_computed(name, tensor, storage_dtype, dtype) for name, tensor in self._tensors(names)}

    def raw(self, name: str) -> torch.Tensor:
        """A tensor with the numbers that are in the files."""
        ((_, tensor),) = self._tensors([name])
        return tensor

    def fill(self, module: nn.Module, prefix: str, storage_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Replace all meta tensors of ``module`` by those of the files; see :meth:`read`."""
        state = self.read([prefix + name for name in module.state_dict()], storage_dtype, dtype)
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()}, assign=True)

    def repeat(self, tied: Mapping[str, str]) -> None:
        """Find tensors under more names, which no file has: name -> the one it is stored under; nothing by default."""

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors, with the numbers that are stored."""
        raise NotImplementedError


class Weights(TensorReader):
    """Tensors of a safetensors checkpoint by parameter name.

    Raises:
        CheckpointError: the folder's files are absent, damaged, not plain files of this folder, or hold a tensor twice.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.places: dict[str, Placed] = {**_places(folder)}

    @property
    def bytes_on_disk(self) -> int:
        """Size of the files without their headers, which grow with names, not with weights."""
        files = {part.file for place in self.places.values() for part in place.parts}
        return sum(map(tensor_bytes_in, files))

    @property
    def dtype(self) -> torch.dtype:
        """Of the first float tensor in the first file, as transformers does for ``dtype="auto"``; fp32 without any."""
        first = min((place.file for place in self.places.values()), default=None)
        kinds = [place.kind for place in self.places.values() if place.file == first]
        return next((KINDS[kind] for kind in kinds if kind in KINDS), torch.float32)

    def match(self, model: PreTrainedModel, current: Callable[[str], str] = str) -> bool:
        """Match checkpoint names to those of a model, which may be empty; False where not all of a model's are there.

        Args:
            current: what a name of the files' format is called in this version's.

        Raises:
            CheckpointError: a tensor lies in parts that do not go together, or all names have a prefix that no model
                has.
        """
        self.places = {current(name): place for name, place in self.places.items()}
        prefix, wanted = model.base_model_prefix, set(untied_state(model))
        found = _renamed(self.places, prefix, wanted)
        if not wanted <= set(found):
            self._check_prefix(wanted)
            found = _renamed(converted(self.places, model), prefix, wanted)
        self.places = found
        return wanted <= set(found)

    def _check_prefix(self, wanted: set[str]) -> None:
        last = max(wanted, key=len, default="")
        for prefix in sorted(name.removesuffix(last) for name in self.places if name.endswith(f".{last}")):
            if all(prefix + name in self.places for name in wanted):
                raise CheckpointError(
                    f"{self.folder} has {prefix!r} before the names of all weights; take it off the names, and save "
                    "the tensors again"
                )

    def check_config(self, config) -> None:
        """Before a model is built: one of two billion blocks would take hours.

        Raises:
            CheckpointError: there are more blocks by the config than tensors, or no positions.
        """
        text = config.get_text_config()
        positions, blocks = (getattr(text, name, None) for name in ("max_position_embeddings", "num_hidden_layers"))
        if isinstance(positions, int) and positions < 1:
            raise CheckpointError(
                f"{self.folder} has {positions} positions by its config; correct max_position_embeddings in config.json"
            )
        if isinstance(blocks, int) and blocks > len(self.places):
            raise CheckpointError(
                f"{self.folder} holds {plural(len(self.places), 'tensor')}, and has {blocks} blocks by the config; "
                "correct config.json, or download or copy the checkpoint again"
            )

    def check_fits(self, model: PreTrainedModel) -> None:
        """Compare with the model, which may be empty: what both have by shape, and that floats are floats; then the
        sizes.

        Raises:
            CheckpointError: a tensor is another than the config describes, or it describes far more than there is.
        """
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            place = self.places.get(name)
            floats = isinstance(tensor, nn.Parameter) or tensor.is_floating_point()
            if place and place.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{name} has shape {list(place.shape)} in {place.file}, and {list(tensor.shape)} by the config; "
                    "correct config.json, or download or copy the checkpoint again"
                )
            if place and (("F" in place.kind) != floats or place.kind.startswith("C")):  # C64: complex
                wanted = "floating-point numbers" if floats else "integers"
                raise CheckpointError(
                    f"{name} holds {place.kind} in {place.file}, and must hold {wanted}; "
                    "download or copy the checkpoint again"
                )
        held = sum(math.prod(place.shape) for place in self.places.values())
        needed = sum(tensor.numel() for tensor in untied_state(model).values())
        if needed > 2 * held:  # what is missing would be made before it is missed
            raise CheckpointError(
                f"{self.folder} holds {held:,} numbers, and the config describes {needed:,}; correct config.json, or "
                "download or copy the checkpoint again"
            )

    def unused(self, model: PreTrainedModel) -> list[str]:
        """Names of tensors that the model has no place for, without those that transformers ignores in its family."""
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        names = set(self.places) - set(model.state_dict())
        return sorted(n for n in names if not any(re.search(pattern, n) for pattern in ignored))

    def repeat(self, tied: Mapping[str, str]) -> None:
        self.places = {
            name: self.places[stored] for name, stored in tied.items() if stored in self.places
        } | self.places

    def has_untied(self, model: PreTrainedModel) -> bool:
        """Whether tensors that a model ties are both there, and unequal."""
        there = [pair for pair in tied_names(model).items() if {*pair} <= set(self.places)]
        return any(not torch.equal(*map(self.raw, pair)) for pair in there)

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors by name; every file is opened once."""
        with contextlib.ExitStack() as stack:
            files = sorted({part.file for name in names for part in self.places[name].parts})
            handles = {file: stack.enter_context(_open(file)) for file in files}
            for name in names:
                place = self.places[name]
                yield name, place.value([handles[part.file].get_tensor(part.name) for part in place.parts])


def _renamed(places: dict[str, Placed], prefix: str, wanted: set[str]) -> dict[str, Placed]:
    """With or without the base model's prefix, whichever gives more of the names."""
    changes = (str, lambda n: f"{prefix}.{n}", lambda n: n.removeprefix(f"{prefix}."))
    renamed = [{change(name): place for name, place in places.items()} for change in changes]
    return max((r for r in renamed if len(r) == len(places)), key=lambda r: len(wanted & set(r)))


def _open(file: Path):
    with reporting(CheckpointError, f"{file} is not a readable safetensors file", "download or copy it again"):
        return safe_open(file, framework="pt")


def tensor_bytes_in(file: Path) -> int:
    """Count the bytes of a safetensors file behind its header: eight that hold a length, and a JSON of that length."""
    with file.open("rb") as handle:
        return file.stat().st_size - 8 - int.from_bytes(handle.read(8), "little")


def _places(folder: Path) -> dict[str, Place]:
    single = folder / SINGLE
    if single.exists() or not (folder / INDEX).exists():  # as transformers chooses
        files, named = [single], {}
    else:
        named = _read_index(folder)
        files = [folder / file for file in sorted(set(named.values()))]
    found: dict[str, Place] = {}
    for file in files:
        _check_plain(folder, file)
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if name in found:
                    raise CheckpointError(f"{name} is in {found[name].file} and in {file}; remove one of them")
                part = handle.get_slice(name)
                found[name] = Place(file, name, tuple(part.get_shape()), part.get_dtype())
    lacking = sorted(name for name, file in named.items() if name not in found or found[name].file.name != file)
    if lacking:
        raise CheckpointError(
            f"{folder / INDEX} names {listed(lacking)}, and the files do not hold it there; download or copy them again"
        )
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> name of a file."""
    with reporting(CheckpointError, f"{folder / INDEX} is damaged", "download or copy it again"):
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        strange = sorted(
            {str(f) for f in named.values() if not isinstance(f, str) or f in ("", "..") or Path(f).name != f}
        )
    if strange:
        raise CheckpointError(
            f"{folder / INDEX} names {listed(strange)}: not a file in this folder; "
            "only files next to the index are read"
        )
    missing = sorted({file for file in named.values() if not (folder / file).exists()})
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)} named by its index; download or copy it again")
    return named


def _check_plain(folder: Path, file: Path) -> None:
    if not file.exists():
        raise CheckpointError(
            f"{folder} has no model.safetensors; rankfold reads safetensors and GGUF only (a pickle may run code). "
            "Convert it with save_pretrained"
        )
    if not file.is_file():
        raise CheckpointError(f"{file} is not a plain file; put the weights there as safetensors")


def listed(names: list[str]) -> str:
    """Names in one line, a few of them where there are many."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def missed(model: PreTrainedModel, unused: list[str]) -> list[str]:
    """Of tensors a model does not use, weights of its own blocks: with a config without them it is another model."""
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists |= {name.removeprefix(f"{model.base_model_prefix}.") for name in lists}
    return [name for name in unused if (found := IN_LIST.match(name)) and found[1] in lists]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the name of every tensor that a model ties -> that of the one it is; without what transformers notes when
    it has made a model nothing is tied."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def untied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and saved buffer of a model once, by name."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def fill_outer(
    model: PreTrainedModel, blocks: str, weights: TensorReader, storage_dtype: torch.dtype, device: torch.device
) -> None:
    """Load what is not in the list of blocks of this name, and tie the head."""
    prefix = f"{blocks}."
    outer = [name for name in untied_state(model) if not name.startswith(prefix)]
    state = weights.read(sorted(outer), storage_dtype, model.dtype)
    check_finite(state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    weights.repeat(tied_names(model))
    move_outer(model, blocks, device)


def move_outer(model: nn.Module, blocks: str, device: torch.device) -> None:
    """Move what is around the blocks of this path to a device; they stay where they are."""
    owner, _, name = blocks.rpartition(".")
    place = model.get_submodule(owner)
    there = getattr(place, name)
    setattr(place, name, nn.ModuleList())
    try:
        nn.Module.to(model, device)  # whose types a decorator of transformers hides
    finally:
        setattr(place, name, there)


def is_known(thing: torch.Tensor | nn.Module) -> bool:
    """Tell whether a tensor or layer is PyTorch's or transformers'; a quantiser's shows floats and holds codes."""
    return type(thing).__module__.partition(".")[0] in KNOWN


def check_finite(state: dict[str, torch.Tensor]) -> None:
    """Raise :class:`NumericsError` where a weight has entries that are NaN or infinite, and name it.

    The ranges on a device are looked at together: a look waits for it. Tensors on the meta device, which has no
    numbers, are passed over, and those of a quantiser, which has no ranges.
    """
    floats = {name: x for name, x in state.items() if x.is_floating_point() and x.numel()}
    there = {name: x for name, x in floats.items() if not x.is_meta and is_known(x)}
    ends = defaultdict(list)
    for tensor in there.values():
        ends[tensor.device] += torch.aminmax(tensor)
    if all(torch.stack(some).isfinite().all() for some in ends.values()):
        return
    for name, tensor in there.items():
        if not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericsError(f"weight {name} has {bad} NaN or infinite entries; the checkpoint is damaged")
