"""Moments of all blocks, in memory or in a folder: calibrate once, compress many times."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .._utils.files import check_name, make_folder, read_json, sweep, sync_folder, write_json, write_tensors, writing
from .._utils.locking import locked
from .._utils.present import present
from .._utils.schema import NUMBER, Maybe, check_record
from .._utils.stopwatch import time_spent
from ..data.batches import Data, add_tensors, as_data, as_tensors, digest_of
from ..data.calibration_data import upgrade_calibration
from ..errors import CheckpointError, command
from .moments import BlockMoments, Moment, moved

log = logging.getLogger(__name__)

PARTS = ("total", "absolute", "second", "rows", "windows")
RECORD, UNFINISHED, LOCK = "moments.json", "moments.unfinished.json", ".rankfold.lock"
HELD_OUT = "held-out.safetensors"
CHANGED = "its content is not what was written there"
FACTS = "facts"  # in the metadata of a block's file: counts and digest
# What moments.json must hold.
IDENTITY = {
    "name": str,
    "model": str,
    "blocks": int,
    "dtype": str,
    "tokens": {
        "source": str,
        "origin": str,
        "num_samples": int,
        "max_length": int,
        "tokens": int,
        "seed": int,
        "sha256": str,
        "held_out": Maybe(int),
        "texts": Maybe([{"source": str, "share": NUMBER, "num_samples": int, "held_out": int}]),
    },
    "statistics": [str],
}


class MomentStore:
    """Block index -> moments.

    Args:
        identity: what the moments were measured on (model, tokens, precision, statistics); two stores with equal
            identity hold the same numbers.
        folder: where to keep them; ``None`` keeps them in memory.
        held_out: windows, images or examples that were not measured, to judge what is fitted to the others.
        written: the identity with the keys of the version that began the folder.
    """

    def __init__(
        self, identity: dict, folder: Path | None = None, held_out: Data | None = None, written: dict | None = None
    ):
        self.identity, self.folder, self.held_out = identity, folder, held_out
        self._written = written or identity  # digests of blocks are of the identity as the folder has it
        self._blocks: dict[int, BlockMoments] = {}

    @classmethod
    @contextlib.contextmanager
    def filling(cls, identity: dict, folder: Path | None, held_out: Data | None = None) -> Iterator["MomentStore"]:
        """A store that this process alone fills, and that is finished behind the block; see :meth:`create`.

        Raises:
            CheckpointError: the folder holds something else, or another process fills it.
        """
        if folder is None:
            yield cls(identity, None, held_out)
            return
        _check_folder(folder, identity)
        make_folder(folder)
        with locked(folder / LOCK, folder):
            store = cls.create(identity, folder, held_out)
            yield store
            store.finish()

    @classmethod
    def create(cls, identity: dict, folder: Path | None, held_out: Data | None = None) -> "MomentStore":
        """A store to be filled; a folder of the same identity is continued.

        Raises:
            CheckpointError: the folder holds something else.
        """
        if folder is None:
            return cls(identity, None, held_out)
        _check_folder(folder, identity)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
        records = [folder / name for name in (RECORD, UNFINISHED) if (folder / name).exists()]
        if not records:
            write_json(folder / UNFINISHED, identity)
        if held_out is not None:
            write_tensors(folder / HELD_OUT, as_tensors(held_out))
        return cls(identity, folder, held_out, read_json(records[0]) if records else None)

    @classmethod
    def open(cls, folder: str | Path) -> "MomentStore":
        """A finished folder.

        Raises:
            CheckpointError: not there, or not finished.
        """
        folder = Path(folder)
        if (folder / UNFINISHED).exists():
            raise CheckpointError(
                f"the calibration in {folder} did not finish; call {command('calibrate')} again, with the same options"
            )
        if not (folder / RECORD).exists():
            raise CheckpointError(f"{folder} is not a moments folder; make one with {command('calibrate')}")
        written = read_json(folder / RECORD)
        identity = upgrade_calibration(written)
        check_record(identity, IDENTITY, folder / RECORD)
        return cls(identity, folder, _read_held_out(folder / HELD_OUT, identity["tokens"]), written)

    def finish(self) -> None:
        """Declare all blocks written."""
        if self.folder and (self.folder / UNFINISHED).exists():
            with writing(self.folder):
                os.replace(self.folder / UNFINISHED, self.folder / RECORD)
                sync_folder(self.folder)

    def missing(self, blocks: int) -> set[int]:
        """Which of the first ``blocks`` blocks are not there as they were written; all that are get read."""
        return {index for index in range(blocks) if not self._sound(index)}

    def _sound(self, index: int) -> bool:
        if self.folder is None:
            return index in self._blocks
        if not self._path(index).exists():
            return False
        try:
            self[index]
        except CheckpointError as error:
            log.warning("%s; measuring the block again", error)
            return False
        return True

    def _path(self, index: int) -> Path:
        return present(self.folder) / f"block-{index:05d}.safetensors"

    @time_spent("writing")
    def __setitem__(self, index: int, moments: BlockMoments) -> None:
        moments = {name: moment.rounded() for name, moment in moments.items()}
        if self.folder is None:
            self._blocks[index] = moved(moments, torch.device("cpu"))  # a device holds the moments of one block
            return
        parts = {f"{name}.{part}": getattr(moment, part) for name, moment in moments.items() for part in PARTS}
        tensors = {key: tensor.contiguous() for key, tensor in parts.items() if tensor is not None}
        counts = {name: moment.count for name, moment in sorted(moments.items())}
        facts = {"counts": counts, "sha256": self._digest(index, tensors, counts)}
        write_tensors(self._path(index), tensors, {FACTS: json.dumps(facts)})  # one key: safetensors shuffles them

    @time_spent("reading")
    def __getitem__(self, index: int) -> BlockMoments:
        if self.folder is None:
            return self._blocks[index]
        path = self._path(index)
        try:
            with safe_open(path, framework="pt") as handle:
                facts = json.loads((handle.metadata() or {}).get(FACTS, "{}"))
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(_damaged(path, error)) from error
        facts = facts if isinstance(facts, dict) else {}
        counts = facts.get("counts", {})
        if facts.get("sha256") != self._digest(index, tensors, counts):
            raise CheckpointError(_damaged(path, CHANGED))
        return {
            name: Moment(float(count), *(tensors.get(f"{name}.{part}") for part in PARTS))
            for name, count in counts.items()
        }

    def _digest(self, index: int, tensors: dict[str, Tensor], counts: dict[str, float]) -> str:
        """SHA-256 of a block's numbers, names and what they were measured on: tells other moments from damaged ones."""
        digest = hashlib.sha256(json.dumps([self._written, index, counts], sort_keys=True).encode())
        add_tensors(digest, tensors)
        return digest.hexdigest()

    def check(self, source, statistics: set[str]) -> None:
        """Raise :class:`CheckpointError` unless these moments are of ``source`` and hold ``statistics``."""
        where, dtype = self.folder or "memory", str(source.dtype).removeprefix("torch.")
        if self.identity["dtype"] != dtype:
            raise CheckpointError(
                f"the moments in {where} were measured on weights in {self.identity['dtype']}, not {dtype}; use that "
                "dtype or calibrate again"
            )
        if self.identity["model"] != source.fingerprint:
            raise CheckpointError(
                f"the moments in {where} were measured on another model ({self.identity['name']}); calibrate this one"
            )
        missing = statistics - set(self.identity["statistics"])
        if missing:
            raise CheckpointError(
                f"the moments in {where} lack {', '.join(sorted(missing))}; calibrate again for this method"
            )


def _check_folder(folder: Path, identity: dict) -> None:
    """Raise :class:`CheckpointError` unless moments of this identity may be kept in ``folder``."""
    check_name(folder)
    with writing(folder):
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; choose another folder")
        names = {path.name for path in folder.iterdir()} - {LOCK, f"{UNFINISHED}.tmp"}
    known = names & {RECORD, UNFINISHED}
    if names and not known:
        raise CheckpointError(f"{folder} exists and is not a moments folder; choose another folder")
    for name in sorted(known):
        found = upgrade_calibration(read_json(folder / name, folder))
        if found != identity:
            other = ", ".join(sorted(key for key in identity if found.get(key) != identity[key]))
            raise CheckpointError(
                f"{folder} holds moments of another model, text or setting; choose another folder (it differs in: "
                f"{other})"
            )


def _read_held_out(path: Path, tokens: dict) -> Data | None:
    """What the record says were not measured."""
    if not tokens.get("held_out"):
        return None
    try:
        held_out = as_data(load_file(path))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(_damaged(path, error)) from error
    if digest_of(held_out) != tokens.get("held_out_sha256"):
        raise CheckpointError(_damaged(path, CHANGED))
    return held_out


def _damaged(path: Path, reason: object) -> str:
    return f"{path} is missing or damaged ({reason}); {command('calibrate')} with the same options measures it anew"
