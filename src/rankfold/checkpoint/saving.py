"""Saving a model that was compressed in memory."""

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from ..files import check_output, sync_files, sync_folder, writing
from ..locking import lock_of, locked

__all__ = ["save_model"]


def save_model(model: PreTrainedModel, folder: str | Path, tokenizer=None) -> Path:
    """Write a model compressed in memory, so that it loads anywhere.

    Args:
        model: what :func:`rankfold.compress` returned.
        folder: must not exist; after an error or a kill it still does not.
        tokenizer: written beside the weights where given.

    Raises:
        CheckpointError: the folder exists, cannot be written, or is written by another process.
    """
    folder = Path(folder)
    check_output(folder)
    unfinished = folder.with_name(f".{folder.name}.rankfold-save")  # whatever has this name was left by a killed save
    with locked(lock_of(folder), folder), writing(folder):
        check_output(folder)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        try:
            model.save_pretrained(unfinished)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            sync_files(unfinished)
            os.rename(unfinished, folder)
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)  # the error is what to tell
            raise
        sync_folder(folder.resolve().parent)
    return folder
