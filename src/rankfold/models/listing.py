"""What the names of files in a folder, or in a repository of the hub, show that it is."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .foreign import foreign_kind
from .weights import INDEX, SINGLE, listed

CONFIG, ADAPTER, MODEL_INDEX, GGUF = "config.json", "adapter_config.json", "model_index.json", ".gguf"
WHOLE = f"{CONFIG} and {SINGLE}, or give a .gguf file"
# What shows that folders below have a model; the hub's cache has its files in snapshots/REVISION.
BELOW = [f"{folders}/{name}" for folders in ("*", "*/*") for name in (CONFIG, SINGLE, INDEX)]
MERGED = "model = PeftModel.from_pretrained(base, adapter).merge_and_unload()"
MERGE = f"merge it with peft ({MERGED}), write the model with save_pretrained and give that"


@dataclass(frozen=True)
class Listing:
    """Names of files.

    Attributes:
        place: the folder, or the repository of the hub.
        files: relative, with slashes between.
        base: of an adapter that is there, the model it belongs to, where that is known.
        is_on_hub: they are not on this machine.
    """

    place: str
    files: frozenset[str]
    base: str | None = None
    is_on_hub: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> "Listing":
        """List what lies in a folder, and where it has no config, the models in folders below.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            files = {path.name + ("/" if path.is_dir() else "") for path in folder.iterdir()}
            below = [] if CONFIG in files else [path for pattern in BELOW for path in folder.glob(pattern)]
        except OSError as error:
            raise CheckpointError(f"cannot read the folder {folder}: {error.strerror}") from error
        files |= {
            path.relative_to(folder).as_posix()
            for path in below
            if path.name != CONFIG or "model_type" in read_dict(path)
        }
        return cls(str(folder), frozenset(files), read_dict(folder / ADAPTER).get("base_model_name_or_path"))

    @property
    def names(self) -> list[str]:
        """What is there without the folders below; a folder's name has a slash behind it."""
        return sorted({re.sub(r"/.+", "/", file) for file in self.files})

    @property
    def is_whole(self) -> bool:
        """Whether it has a config and weights that transformers reads."""
        return CONFIG in self.files and not self.files.isdisjoint((SINGLE, INDEX))

    @property
    def nested(self) -> list[str]:
        """Folders below that are whole; checkpoint-1000 behind checkpoint-500."""
        folders = {file.rpartition("/")[0] for file in self.files if file.endswith(f"/{CONFIG}")}
        whole = [x for x in folders if not self.files.isdisjoint((f"{x}/{SINGLE}", f"{x}/{INDEX}"))]
        return sorted(whole, key=lambda x: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", x)])

    def at(self, name: str) -> str:
        """Say where something in it is to be had."""
        if not self.is_on_hub:
            return str(Path(self.place) / name)
        return f"what `hf download {self.place} --include '{name}*' --local-dir DIR` writes there"


def check_listing(listing: Listing) -> None:
    """Raise :class:`CheckpointError` unless the files are those of a transformers checkpoint, without an adapter."""
    place, files, names = listing.place, listing.files, listing.names
    if ADAPTER in files or (not listing.is_whole and any(name.startswith("adapter_model.") for name in names)):
        _refuse_adapter(listing)
    if not names:
        raise CheckpointError(f"{place} is empty; give a folder that has {WHOLE}")
    if listing.is_whole:
        return
    if CONFIG not in files and MODEL_INDEX not in files and (nested := listing.nested):
        where = " or ".join(listing.at(name) for name in nested[-3:])
        raise CheckpointError(f"{place} has no {CONFIG}, and folders in it have; give {where}")
    if CONFIG not in files and not files.isdisjoint((SINGLE, INDEX)):
        raise CheckpointError(f"{place} has weights and no {CONFIG}; put the model's {CONFIG} next to them")
    lacks = f"no {SINGLE}" if CONFIG in files else f"no {CONFIG}"
    if found := [name for name in names if name.lower().endswith(GGUF)]:
        raise CheckpointError(
            f"{place} has {lacks}, and GGUF files ({listed(found)}); give one file, {listing.at(found[0])}"
        )
    own = [name for name in names if name.endswith(".safetensors") and not foreign_kind([name])]
    if own and CONFIG in files:
        raise CheckpointError(
            f"{place} has {lacks} and no {INDEX}, and other safetensors ({listed(own)}); add the index of these, or "
            f"rename a single one to {SINGLE}"
        )
    if kind := foreign_kind(names):
        raise CheckpointError(f"{place} has {lacks}; {kind[0]} is {kind[1]}: {kind[2]}")
    raise CheckpointError(f"{place} has {lacks}; it has {listed(names)}; give a folder that has {WHOLE}")


def read_dict(path: Path) -> dict:
    """Return a JSON object; an empty one where it cannot be read, which whoever needs it reports."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_adapter(listing: Listing) -> None:
    of = f" of {listing.base}" if listing.base else ""
    if CONFIG in listing.files:
        raise CheckpointError(
            f"{listing.place} has an adapter{of} next to the model ({ADAPTER}); move the adapter to a folder of its "
            f"own, and to have it in the model, {MERGE}"
        )
    raise CheckpointError(f"{listing.place} is an adapter{of} without a model; {MERGE}")
