"""Whether a folder or file holds a model that can be read; if not, what it is and what to do.

Only names and first bytes are read, so that nothing of a foreign format is parsed.
"""

import re
from pathlib import Path

from ..errors import CheckpointError
from .foreign import foreign_kind
from .listing import CONFIG, GGUF, MODEL_INDEX, Listing, check_listing, read_dict

HEAD = 100  # bytes; a git-lfs pointer has about 130
PARTED = re.compile(r".*-(\d{5})-of-(\d{5})\.gguf")
# Names of what transformers reads: a pointer in the place of another file does not matter.
READ = re.compile(
    r"(config|generation_config|model.*|adapter_config|adapter_model|(pre)?processor_config|chat_template|added_tokens"
    r"|special_tokens_map|tokenizer.*|vocab|merges|modules)\.(json|safetensors|model|txt|jinja)"
)
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
            f"{file} is part {int(parts[1])} of {int(parts[2])}; join them with `llama-gguf-split --merge` and give "
            "the whole"
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
    listing = Listing.of_folder(folder)
    for name in listing.names:
        if READ.fullmatch(name) or not (listing.is_whole or name.endswith("/")):
            _check_stand_in(folder / name)
    check_listing(listing)
    if "_diffusers_version" in raw_config(folder):
        raise CheckpointError(f"{folder} is a part of a diffusers pipeline; give the folder of a language model")


def raw_config(folder: Path) -> dict:
    """Return config.json as it is; nothing where it cannot be read, which :func:`~.whole.read_config` reports."""
    return read_dict(folder / CONFIG)


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
