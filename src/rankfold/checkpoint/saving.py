"""Saving what is written as a whole: a model that was compressed in memory, an export."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .._utils.files import check_output, sync_files, sync_folder, writing
from .._utils.locking import lock_of, locked
from ..errors import OptionError
from ..models.given import check_plain
from ..models.tokenizer import save_tokenizer


def save_model(model: PreTrainedModel, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write a model compressed in memory, so that it loads anywhere.

    Args:
        model: what :func:`rankfold.compress` returned.
        folder: must not exist; after an error or a kill it still does not.
        tokenizer: written next to the weights where given.

    Raises:
        CheckpointError: the folder exists, cannot be written, or is written by another process.
        OptionError: what is given as the tokenizer is none.
        UnsupportedModelError: the model carries adapters, or was quantised in memory.
    """
    check_plain(model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(
            f"tokenizer must be one of transformers, got {type(tokenizer).__name__}; give source.tokenizer"
        )
    folder = Path(folder)
    with creating(folder) as unfinished:
        unfinished.mkdir()
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished)
    return folder


@contextlib.contextmanager
def creating(output: Path) -> Iterator[Path]:
    """Yield a name next to ``output`` for a folder or file to be made there, which is renamed to it after the block.

    After an error or a kill there is no ``output``; what a kill leaves goes with the next try.

    Raises:
        CheckpointError: the output exists, cannot be written, or is written by another process.
    """
    check_output(output)
    unfinished = output.with_name(f".{output.name}.rankfold-save")  # whatever has this name was left by a killed one
    with locked(lock_of(output), output), writing(output):
        check_output(output)
        _remove(unfinished)
        try:
            yield unfinished
            sync_files(unfinished)
            check_output(output)  # a file would be replaced
            os.rename(unfinished, output)
        except Exception:
            with contextlib.suppress(OSError):  # the error is what to tell
                _remove(unfinished)
            raise
        sync_folder(output.resolve().parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
