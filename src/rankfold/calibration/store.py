"""Moments of all blocks, in memory or in a folder: calibrate once, compress many times."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import read_json, write_json, write_tensors
from .moments import BlockMoments, Moment

__all__ = ["MomentStore"]

PARTS = ("total", "absolute", "second", "rows")
RECORD, UNFINISHED = "moments.json", "moments.unfinished.json"
HELD_OUT = "held-out.safetensors"


class MomentStore:
    """Block index -> moments.

    Args:
        identity: what the moments were measured on (model, tokens, precision, statistics); two stores with equal
            identity hold the same numbers.
        folder: where to keep them; ``None`` keeps them in memory.
        held_out: ``(S, T)`` ids of windows that were not measured, to judge what is fitted to the others.
    """

    def __init__(self, identity: dict, folder: Path | None = None, held_out: Tensor | None = None):
        self.identity, self.folder, self._held_out = identity, folder, held_out
        self._blocks: dict[int, BlockMoments] = {}

    @classmethod
    def create(cls, identity: dict, folder: Path | None, held_out: Tensor | None = None) -> "MomentStore":
        """A store to be filled; an unfinished folder of the same identity is continued.

        Raises:
            CheckpointError: the folder holds something else.
        """
        if folder is None:
            return cls(identity, None, held_out)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; choose another folder")
        for name in (RECORD, UNFINISHED):
            if (folder / name).exists() and read_json(folder / name) != identity:
                raise CheckpointError(
                    f"{folder} holds moments of another model, text or setting; choose another folder"
                )
        known = (folder / RECORD).exists() or (folder / UNFINISHED).exists()
        if folder.exists() and not known and any(folder.iterdir()):
            raise CheckpointError(f"{folder} exists and is not a moments folder; choose another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {folder}: {error.strerror}") from error
        if not known:
            write_json(folder / UNFINISHED, identity)
        if held_out is not None:
            write_tensors(folder / HELD_OUT, {"ids": held_out})
        return cls(identity, folder, held_out)

    @classmethod
    def open(cls, folder: str | Path) -> "MomentStore":
        """A finished folder.

        Raises:
            CheckpointError: not there, or not finished.
        """
        folder = Path(folder)
        if (folder / UNFINISHED).exists():
            raise CheckpointError(
                f"the calibration in {folder} did not finish; run the same `rankfold calibrate` again"
            )
        if not (folder / RECORD).exists():
            raise CheckpointError(
                f"{folder} is not a moments folder; make one with `rankfold calibrate MODEL -o {folder}`"
            )
        identity = read_json(folder / RECORD)
        return cls(identity, folder, _read_ids(folder / HELD_OUT) if identity["tokens"].get("held_out") else None)

    @property
    def held_out(self) -> Tensor | None:
        """``(S, T)`` ids of the windows that were not measured; ``None`` where all were."""
        return self._held_out

    def finish(self) -> None:
        """Declare all blocks written."""
        if self.folder and (self.folder / UNFINISHED).exists():
            write_json(self.folder / RECORD, self.identity)
            (self.folder / UNFINISHED).unlink()

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def __contains__(self, index: int) -> bool:
        return self._path(index).exists() if self.folder else index in self._blocks

    def __setitem__(self, index: int, moments: BlockMoments) -> None:
        moments = {name: moment.rounded() for name, moment in moments.items()}
        if self.folder is None:
            self._blocks[index] = moments
            return
        tensors, counts = {}, {}
        for name, moment in moments.items():
            counts[f"{name}.count"] = repr(moment.count)
            parts = {f"{name}.{part}": getattr(moment, part) for part in PARTS}
            tensors |= {key: tensor for key, tensor in parts.items() if tensor is not None}
        write_tensors(self._path(index), tensors, counts)

    def __getitem__(self, index: int) -> BlockMoments:
        if self.folder is None:
            return self._blocks[index]
        from safetensors import safe_open

        path = self._path(index)
        try:
            tensors = load_file(path)
            with safe_open(path, framework="pt") as handle:
                counts = handle.metadata()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is missing or damaged; run `rankfold calibrate` again ({error})") from error
        return {
            key.removesuffix(".count"): Moment(
                float(count), *(tensors.get(f"{key.removesuffix('.count')}.{p}") for p in PARTS)
            )
            for key, count in counts.items()
        }

    def check(self, source, statistics: set[str]) -> None:
        """Raise :class:`CheckpointError` unless these moments are of ``source`` and hold ``statistics``."""
        if self.identity["model"] != source.fingerprint:
            raise CheckpointError(
                f"the moments in {self.folder or 'memory'} were measured on another model ({self.identity['name']}); "
                "calibrate this one"
            )
        missing = statistics - set(self.identity["statistics"])
        if missing:
            raise CheckpointError(
                f"the moments in {self.folder or 'memory'} lack {', '.join(sorted(missing))}; calibrate again for this method"
            )


def _read_ids(path: Path) -> Tensor:
    try:
        return load_file(path)["ids"]
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{path} is missing or damaged; calibrate into a new folder ({error})") from error
