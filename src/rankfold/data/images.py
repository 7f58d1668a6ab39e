"""Images for calibration, as a model's own image processor gives them.

Shape legend: S images, C channels, H x W pixels.
"""

import io
import logging
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._utils.extras import require
from ..errors import DataError, first_line
from .batches import Data, Example, length_of
from .calibration_data import CalibrationData
from .hub import StreamedRows
from .mixing import DrawOptions, some_of
from .text import json_rows, open_parquet, origin_of, path_of, use_column

log = logging.getLogger(__name__)

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FILES = ".parquet or .jsonl file"
Image = tuple[str, Path | bytes]  # name for messages, and a file or what is in one


def samples_of_images(
    name: str, rows: StreamedRows | None, model, options: DrawOptions, processor=None
) -> CalibrationData:
    """Draw images for a component that takes images; some more are held out (:func:`.load_calibration`).

    Args:
        name: a folder, searched with all folders in it, a ``.parquet`` file with encoded images, as data sets on the
            hub are stored, or a ``.jsonl`` file with paths of images, each of which counts once.
        rows: a data set with images, of which the first ones are taken; ``name`` is then for messages.
        processor: in place of the model's own.

    Raises:
        DataError: no images there, or one that cannot be read (named).
        OptionError: Pillow is not installed.
        CheckpointError: there is no image processor beside the weights, or the hub cannot be reached.
    """
    column, samples = options.image_column, options.num_samples
    found = _find(name, rows, column, samples + held_out_images(samples))
    chosen, fitted = some_of(found.name, "images", found.images, samples, options.seed, held_out_images)
    processor = model.processors.image_processor if processor is None else processor
    images = (_examples if model.part.packed else _pixels)(chosen, processor)
    return images_as_data(images, fitted, model.part, options, found.name, found.origin, found.draw)


def images_as_data(
    images: Data, fitted: int, part, options: DrawOptions, name: str, origin: str, draw: str
) -> CalibrationData:
    """Return images as a calibration set: the first ones are fitted, the others held out."""
    return CalibrationData(
        images[:fitted],
        name,
        origin,
        options.seed,
        images[fitted:] if fitted < len(images) else None,
        draw,
        patches=length_of(images[:fitted], part),
        wanted=options.num_samples,
        text_column=None if options.text_column in ("text", "image") else options.text_column,
    )


class _Found(NamedTuple):
    """Images to draw from."""

    name: str
    origin: str
    draw: str
    images: list[Image]


def _find(name: str, rows: StreamedRows | None, column: str, wanted: int) -> _Found:
    if rows is not None:
        wheres = ((row, f"{name}, row {number}") for number, row in rows.rows)
        every = ((where, data) for row, where in wheres for data in encoded_images(row, where, column))
        images: list[Image] = list(islice(every, wanted))
        if not images:
            raise DataError(f"{name} holds no images in the column {column!r}; give one that does {use_column()}")
        return _Found(name, rows.origin, rows.draw, images)
    place = path_of(name)
    images = {".parquet": _of_parquet, ".jsonl": _of_jsonl}.get(place.suffix.lower(), _of_folder)(place, column)
    return _Found(place.name, origin_of(place), "images of the whole folder", images)


def held_out_images(samples: int) -> int:
    """Return how many images are held out: more than of text, where a window is as many tokens as some small images."""
    return max(1, samples // 8)


def _of_folder(folder: Path, _: str) -> list[Image]:
    if not folder.is_dir():
        raise DataError(f"no images at {str(folder)!r}: expected a folder of images, or a {FILES}")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder} holds no images; expected files that end in {', '.join(SUFFIXES)}")
    return [(str(path), path) for path in files]


def _of_parquet(file: Path, column: str) -> list[Image]:
    """Rows as `datasets` writes them: ``{"bytes": ..., "path": ...}``, or the bytes alone."""
    _check_file(file)
    with open_parquet(file, column) as table:
        rows = table.read(columns=[column])[column].to_pylist()
    found: list[Image] = []
    for number, row in enumerate(rows):
        data = row.get("bytes") if isinstance(row, dict) else row
        if not isinstance(data, bytes):
            raise DataError(f"{file}, row {number}: column {column!r} holds no encoded image {use_column()}")
        found.append((f"{file}, row {number}", data))
    if not found:
        raise DataError(f"{file} has no rows; give one with images")
    return found


def _of_jsonl(file: Path, column: str) -> list[Image]:
    """Every image once, in the order in which they are named."""
    _check_file(file)
    found = dict.fromkeys(path for where, row in json_rows(file) for path in image_paths(row, where, file, column))
    if not found:
        raise DataError(f"{file} names no images in the column {column!r}; give one that does {use_column()}")
    return [(str(path), path) for path in found]


def encoded_images(row: dict, where: str, column: str = "image") -> tuple[bytes, ...]:
    """Images of one row of a data set: one, several in a list, or none.

    Raises:
        DataError: something else is there.
    """
    if not isinstance(row, dict) or column not in row:
        names = f"it has: {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
        raise DataError(f"{where}: there is no column {column!r}; {names} {use_column()}")
    given = row[column]
    images = given if isinstance(given, list) else [] if given is None else [given]
    found = tuple(map(_encoded, images))
    if not all(isinstance(data, bytes) for data in found):
        raise DataError(f"{where}: column {column!r} holds no encoded image, got {str(given)[:60]} {use_column()}")
    return found


def _encoded(image) -> Any:
    """Return the bytes of an image as a data set has it: encoded, or opened by Pillow."""
    if hasattr(image, "convert"):
        buffer = io.BytesIO()
        image.save(buffer, "png")
        return buffer.getvalue()
    return image.get("bytes") if isinstance(image, dict) else image


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise DataError(f"no images at {str(file)!r}: expected a folder of images, or a {FILES}")


def image_paths(row: Any, where: str, file: Path, column: str = "image") -> tuple[Path, ...]:
    """Images of one row of a ``.jsonl`` file, which names them from the file's folder: one, several in a list, or none.

    Raises:
        DataError: something else is there.
    """
    given = row.get(column) if isinstance(row, dict) else row
    images = given if isinstance(given, list) else [given] if given else []
    if not isinstance(row, dict) or not all(isinstance(image, str) for image in images):
        raise DataError(
            f"{file}, {where}: column {column!r} must hold a path, or a list of paths, got {str(given)[:60]}"
        )
    return tuple(file.parent / image for image in images)


def _pixels(images: list[Image], processor) -> Tensor:
    """Return pixels ``(S, C, H, W)``: of an image that the processor cuts, one piece, by turns each."""
    pixels = []
    for number, image in enumerate(images):
        pieces = _processed([image], processor, "pixel_values")[0].flatten(0, -4)
        pixels.append(pieces[number % len(pieces)])
    if len(sizes := {tuple(one.shape) for one in pixels}) > 1:
        raise DataError(
            f"the model's image processor makes images of {len(sizes)} sizes of these, as {min(sizes)} and {max(sizes)}"
            "; give images of one size, or correct preprocessor_config.json"
        )
    return torch.stack(pixels)


def _examples(images: list[Image], processor) -> tuple[Example, ...]:
    """Return an example of each image, which is read again when it is wanted."""

    def inputs(image: Image) -> dict[str, Tensor]:
        pixels, grid = _processed([image], processor, "pixel_values", "image_grid_thw")
        return {"hidden_states": pixels, "grid_thw": grid}

    return tuple(Example.made_by(partial(inputs, image), image[0]) for image in images)


def _processed(images: list[Image], processor, *names: str) -> list[Tensor]:
    """Return what the processor makes of some images, by name."""
    opened = [read_image(*image) for image in images]
    try:
        made = processor(images=opened, return_tensors="pt")
        return [made[name] for name in names]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the model's image processor makes no {' and '.join(names)} of these images ({first_line(error)}); give "
            "others, or correct preprocessor_config.json"
        ) from error


def read_image(where: str, place: Path | bytes):
    """Return an image of Pillow in RGB.

    Args:
        where: named in messages.  place: a file, or what is in one.

    Raises:
        DataError: it cannot be read.
        OptionError: Pillow is not installed.
    """
    require("PIL", "reading images")
    from PIL import Image as pillow

    try:
        with pillow.open(io.BytesIO(place) if isinstance(place, bytes) else place) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(f"{where} is not a readable image ({first_line(error)}); replace or remove it") from error
