"""Whether a folder or file holds a model that can be read; if not, what it is and what to do.

Only names and first bytes are read, so that nothing of a foreign format is parsed.
"""

import json
import re
from pathlib import Path

from ..errors import CheckpointError
from .foreign import foreign_kind
from .weights import INDEX, SINGLE, listed

__all__ = ["MERGE", "MERGED", "check_file", "check_folder", "raw_config"]

CONFIG, ADAPTER, MODEL_INDEX, GGUF = "config.json", "adapter_config.json", "model_index.json", ".gguf"
WHOLE = f"{CONFIG} and {SINGLE}, or give a .gguf file"
HEAD = 100  # bytes; a git-lfs pointer has about 130
PARTED = re.compile(r".*-(\d{5})-of-(\d{5})\.gguf")
NESTED = ("*/config.json", "*/*/config.json")  # of checkpoints in folders below; the hub's cache has snapshots/REVISION
# Names of what transformers reads: a pointer in the place of another file does not matter.
READ = re.compile(
    r"(config|generation_config|model.*|adapter_config|adapter_model|(pre)?processor_config|chat_template|added_tokens"
    r"|special_tokens_map|tokenizer.*|vocab|merges|modules)\.(json|safetensors|model|txt|jinja)"
)
MERGED = "model = PeftModel.from_pretrained(base, adapter).merge_and_unload()"
MERGE = f"merge it with peft ({MERGED}), write the model with save_pretrained and give that"
STAND_INS = (  # first bytes of what stands in the place of a file
    (b"version https://git-lfs", "is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"),
    (b"<!doctype html", "is a web page, not the file itself; download it again"),
    (b"<html", "is a web page, not the file itself; download it again"),
)


def check_file(file: Path) -> None:
    """Raise :class:`CheckpointError` unless a file is a whole GGUF file, by its name and first bytes.

    A damaged file under the name of a GGUF file is left to its reader.
    """
    _check_stand_in(file)
    parts = PARTED.fullmatch(file.name)
    if parts and int(parts[2]) > 1:
        raise CheckpointError(
            f"{file} is part {int(parts[1])} of {int(parts[2])}; join them with `llama-gguf-split --merge` and give the whole"
        )
    if file.suffix == GGUF:
        return
    if file.suffix.lower() == GGUF or _head(file).startswith(b"gguf"):
        raise CheckpointError(f"{file} is a GGUF file under another suffix than {GGUF}; rename it")
    if file.suffix in (".safetensors", ".json") and file.name not in (MODEL_INDEX, "params.json"):
        raise CheckpointError(f"{file} is one file of a checkpoint; give its folder, {file.parent}")
    if kind := foreign_kind([file.name]):
        raise CheckpointError(f"{file} is {kind[1]}; {kind[2]}")
    raise CheckpointError(f"{file} is neither a folder nor a .gguf file; give the folder that has config.json")


def check_folder(folder: Path) -> None:
    """Raise :class:`CheckpointError` unless a folder has the files of a transformers checkpoint, and no adapter."""
    try:
        names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {folder}: {error.strerror}") from error
    has_weights = SINGLE in names or INDEX in names
    whole = CONFIG in names and has_weights
    for name in names:
        if READ.fullmatch(name) or not (whole or name.endswith("/")):
            _check_stand_in(folder / name)
    if ADAPTER in names or (not whole and any(name.startswith("adapter_model.") for name in names)):
        _refuse_adapter(folder, CONFIG in names)
    if not names:
        raise CheckpointError(f"{folder} is empty; give a folder that has {WHOLE}")
    if CONFIG not in names and MODEL_INDEX not in names:
        _refuse_nested(folder)
    if not whole:
        _refuse_foreign(folder, names, has_weights)
    if "_diffusers_version" in raw_config(folder):
        raise CheckpointError(f"{folder} is a part of a diffusers pipeline; give the folder of a language model")


def raw_config(folder: Path) -> dict:
    """Return config.json as it is; nothing where it cannot be read, which :func:`~.whole.read_config` reports."""
    return _json(folder / CONFIG)


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _head(file: Path) -> bytes:
    """First bytes of a file, in small letters; of a pipe none, which would be waited for."""
    if not file.is_file():
        return b""
    try:
        with file.open("rb") as handle:
            return handle.read(HEAD).lstrip().lower()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def _check_stand_in(file: Path) -> None:
    if file.is_symlink() and not file.exists():
        raise CheckpointError(
            f"{file} is a link to a file that is not there; copy its folder with `cp -rL`, or download it again"
        )
    head = _head(file)
    for start, what in STAND_INS:
        if head.startswith(start):
            raise CheckpointError(f"{file} {what}")


def _refuse_adapter(folder: Path, beside: bool) -> None:
    base = _json(folder / ADAPTER).get("base_model_name_or_path")
    of = f" of {base}" if base else ""
    if beside:
        raise CheckpointError(
            f"{folder} has an adapter{of} beside the model ({ADAPTER}); move the adapter's files to a folder of their own; if "
            f"it is to count, {MERGE}"
        )
    raise CheckpointError(f"{folder} is an adapter{of} without a model; {MERGE}")


def _refuse_nested(folder: Path) -> None:
    """Name the checkpoints in the folders below; checkpoint-1000 comes behind checkpoint-500."""
    found = {path.parent for pattern in NESTED for path in folder.glob(pattern) if "model_type" in _json(path)}
    if found:
        places = sorted(found, key=lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", str(path))])
        raise CheckpointError(
            f"{folder} has no {CONFIG}, and folders in it have; give {' or '.join(map(str, places[-3:]))}"
        )


def _refuse_foreign(folder: Path, names: list[str], has_weights: bool) -> None:
    """Name what is there in place of a checkpoint."""
    if has_weights:
        raise CheckpointError(f"{folder} has weights and no {CONFIG}; put the model's {CONFIG} beside them")
    lacks = f"no {SINGLE}" if CONFIG in names else f"no {CONFIG}"
    if files := [name for name in names if name.lower().endswith(GGUF)]:
        raise CheckpointError(
            f"{folder} has {lacks}, and GGUF files ({listed(files)}); give one file, {folder / files[0]}"
        )
    own = [name for name in names if name.endswith(".safetensors") and not foreign_kind([name])]
    if own and CONFIG in names:
        raise CheckpointError(
            f"{folder} has {lacks} and no {INDEX}, and other safetensors ({listed(own)}); add the index of these, or rename a "
            f"single one to {SINGLE}"
        )
    if kind := foreign_kind(names):
        raise CheckpointError(f"{folder} has {lacks}; {kind[0]} is {kind[1]}: {kind[2]}")
    raise CheckpointError(f"{folder} has {lacks}; it has {listed(names)}; give a folder that has {WHOLE}")
