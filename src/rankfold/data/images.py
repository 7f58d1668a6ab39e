"""Images for calibration, as a model's own image processor gives them.

Shape legend: S images, C channels, H x W pixels.
"""

import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError, OptionError, first_line
from .batches import Data, Example, length_of
from .hub import HUB, image_text_rows
from .mixing import some_of
from .text import json_rows, open_parquet, origin_of
from .windows import Tokens

__all__ = ["Images", "encoded_images", "image_paths", "load_images", "read_image"]

log = logging.getLogger(__name__)

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FILES = ".parquet or .jsonl file"
TOGETHER = 64  # images that the processor gets at once
Readers = list[tuple[str, Callable]]  # name for messages, and what gives a path or an open file of the image


@dataclass(frozen=True)
class Images(Tokens):
    """Images as an encoder takes them, in the place of windows of token ids."""

    ids: Data  # (S, C, H, W) floating point, or an example for each of several sizes; what moments are measured on
    held_out: Data | None = None  # further images of the same draw that nothing is fitted to
    draw: str = "images of the whole folder"
    patches: int = 0  # that an image is cut into; where sizes differ the mean, rounded down

    def __post_init__(self):
        for name, images in (("ids", self.ids), ("held_out", self.held_out)):
            if images is not None:
                _check_images(name, images)

    @property
    def tokens(self) -> int:
        """Patches of all images that are fitted."""
        if isinstance(self.ids, Tensor):
            return len(self.ids) * self.patches
        return sum(image.tokens for image in self.ids)

    @property
    def length(self) -> int:
        return self.patches

    def describe(self) -> dict:
        return super().describe() | {"kind": "images", "tokens": self.tokens}


def load_images(
    name: str | Path, source, *, samples: int = 128, seed: int = 0, field: str = "image", processor=None
) -> Images:
    """Images for calibrating a part that takes images, drawn at random out of a folder, a parquet file, or what a file of
    image-text examples names.

    Some more images of the same draw are held out, one for eight samples and at least one; they are taken out of the samples
    where there are too few images.

    Args:
        name: a folder, searched with all folders in it, a ``.parquet`` file with encoded images, as data sets on the hub are
            stored, a ``.jsonl`` file with paths of images, each of which counts once (:func:`.load_examples`), or
            ``hub:OWNER/NAME``, a data set with images on the hub, of which the first ones of a shuffled stream are taken.
        source: an open model; its image processor is used.
        samples: ``>= 1``.
        seed: of the draw.
        field: column of the parquet or jsonl file, or of the data set.
        processor: in place of the one beside the weights.

    Raises:
        DataError: no images there, or one that cannot be read (named).
        OptionError: ``samples`` out of range, or Pillow is not installed.
        CheckpointError: there is no image processor beside the weights, or the hub cannot be reached.
    """
    if samples < 1:
        raise OptionError(f"samples must be >= 1, got {samples}")
    found = _find(str(name), field, samples + _held_out_of(samples), seed)
    chosen, fitted = some_of(found.name, "images", found.readers, samples, seed, _held_out_of)
    processor = source.processors.image_processor if processor is None else processor
    images = (_examples if source.part.packed else _pixels)(chosen, processor)
    held_out = images[fitted:] if fitted < len(images) else None
    patches = length_of(images[:fitted], source.part)
    facts = {"field": None if field == "image" else field, "wanted": samples, "patches": patches}
    return Images(images[:fitted], found.name, found.origin, seed, held_out, found.draw, **facts)


class _Found(NamedTuple):
    """Images to draw from."""

    name: str
    origin: str
    draw: str
    readers: Readers


def _find(name: str, field: str, wanted: int, seed: int) -> _Found:
    if name.startswith(HUB):
        hub = image_text_rows(name, seed)
        readers = list(islice(_of_rows(hub.rows, name, field), wanted))
        if not readers:
            raise DataError(f"{name} holds no images in the column {field!r}; give one that does (use --field)")
        return _Found(name, hub.origin, hub.draw, readers)
    place = Path(name).expanduser()
    readers = {".parquet": _of_parquet, ".jsonl": _of_jsonl}.get(place.suffix.lower(), _of_folder)(place, field)
    return _Found(place.name, origin_of(place), Images.draw, readers)


def _held_out_of(samples: int) -> int:
    """More than of text, where a window is as many tokens as some small images."""
    return max(1, samples // 8)


def _of_folder(folder: Path, _: str) -> Readers:
    if not folder.is_dir():
        raise DataError(f"no images at {str(folder)!r}: expected a folder of images, or a {FILES}")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder} holds no images; expected files that end in {', '.join(SUFFIXES)}")
    return [(str(path), lambda path=path: path) for path in files]


def _of_parquet(file: Path, field: str) -> Readers:
    """Rows as `datasets` writes them: ``{"bytes": ..., "path": ...}``, or the bytes alone."""
    _check_file(file)
    with open_parquet(file, field) as table:
        rows = table.read(columns=[field])[field].to_pylist()
    found = []
    for number, row in enumerate(rows):
        data = row.get("bytes") if isinstance(row, dict) else row
        if not isinstance(data, bytes):
            raise DataError(f"{file}, row {number}: column {field!r} holds no encoded image (use --field)")
        found.append((f"{file}, row {number}", lambda data=data: io.BytesIO(data)))
    if not found:
        raise DataError(f"{file} has no rows; give one with images")
    return found


def _of_jsonl(file: Path, field: str) -> Readers:
    """Every image once, in the order in which they are named."""
    _check_file(file)
    found = dict.fromkeys(path for where, row in json_rows(file) for path in image_paths(row, where, file, field))
    if not found:
        raise DataError(f"{file} names no images in the column {field!r}; give one that does (use --field)")
    return [(str(path), lambda path=path: path) for path in found]


def _of_rows(rows: Iterator[dict], name: str, field: str) -> Iterator[tuple[str, Callable]]:
    """Every image of a data set."""
    for number, row in enumerate(rows):
        for data in encoded_images(row, f"{name}, row {number}", field):
            yield f"{name}, row {number}", lambda data=data: io.BytesIO(data)


def encoded_images(row: dict, where: str, field: str = "image") -> tuple[bytes, ...]:
    """Images of one row of a data set: one, several in a list, or none.

    Raises:
        DataError: something else is there.
    """
    if field not in row:
        raise DataError(f"{where}: there is no column {field!r}; it has: {', '.join(row)} (use --field)")
    given = row[field]
    images = given if isinstance(given, list) else [] if given is None else [given]
    found = tuple(image.get("bytes") if isinstance(image, dict) else image for image in images)
    if not all(isinstance(data, bytes) for data in found):
        raise DataError(f"{where}: column {field!r} holds no encoded image, got {str(given)[:60]} (use --field)")
    return found


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise DataError(f"no images at {str(file)!r}: expected a folder of images, or a {FILES}")


def image_paths(row: Any, where: str, file: Path, field: str = "image") -> tuple[Path, ...]:
    """Images of one row of a ``.jsonl`` file, which names them from the file's folder: one, several in a list, or none.

    Raises:
        DataError: something else is there.
    """
    given = row.get(field) if isinstance(row, dict) else row
    images = given if isinstance(given, list) else [given] if given else []
    if not isinstance(row, dict) or not all(isinstance(image, str) for image in images):
        raise DataError(
            f"{file}, {where}: column {field!r} must hold a path, or a list of paths, got {str(given)[:60]}"
        )
    return tuple(file.parent / image for image in images)


def _pixels(readers: Readers, processor) -> Tensor:
    """``(S, C, H, W)``"""
    groups = (readers[begin : begin + TOGETHER] for begin in range(0, len(readers), TOGETHER))
    return torch.cat([_processed(group, processor, "pixel_values")[0] for group in groups])


def _examples(readers: Readers, processor) -> tuple[Example, ...]:
    """One an image, read again when it is wanted."""

    def inputs(reader: tuple[str, Callable]) -> dict[str, Tensor]:
        pixels, grid = _processed([reader], processor, "pixel_values", "image_grid_thw")
        return {"hidden_states": pixels, "grid_thw": grid}

    return tuple(Example.made_by(partial(inputs, reader), reader[0]) for reader in readers)


def _processed(readers: Readers, processor, *names: str) -> list[Tensor]:
    """What the processor makes of some images, by name."""
    images = [read_image(where, place()) for where, place in readers]
    try:
        made = processor(images=images, return_tensors="pt")
        return [made[name] for name in names]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the model's image processor makes no {' and '.join(names)} of these images ({first_line(error)}); give others, "
            "or correct preprocessor_config.json"
        ) from error


def read_image(where: str, place):
    """An image in RGB.

    Args:
        where: named in messages.  place: a path or an open file.

    Raises:
        DataError: it cannot be read.
        OptionError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise OptionError(
            "images are read by Pillow, which is not installed; pip install 'rankfold[images]'"
        ) from error
    try:
        with Image.open(place) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} is not a readable image ({first_line(error)}); replace or remove it") from error


def _check_images(name: str, images) -> None:
    if (
        isinstance(images, tuple)
        and images
        and all(isinstance(image, Example) and image.ids is None for image in images)
    ):
        return
    _check_pixels(name, images)


def _check_pixels(name: str, pixels) -> None:
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.dim() != 4 or not len(pixels):
        got = f"{list(pixels.shape)} of {pixels.dtype}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise DataError(f"{name} must be a tensor (images, channels, height, width) of floats, got {got}")
    if not torch.isfinite(pixels).all():
        raise DataError(f"{name} holds NaN or infinite pixels; give others")
