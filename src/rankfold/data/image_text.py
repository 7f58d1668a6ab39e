"""Image-text examples for calibration, as a model's own processor gives them.

Shape legend: S examples, T tokens of one, those in whose places images stand among them.
"""

import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .._utils.sizes import plural
from ..errors import DataError, first_line
from .batches import Example
from .calibration_data import CalibrationData
from .hub import HUB, StreamedRows
from .images import encoded_images, image_paths, read_image
from .mixing import DrawOptions, some_of
from .text import filled_lines, json_row, json_rows, origin_of, path_of, text_of
from .tokens import check_fits

log = logging.getLogger(__name__)

IMAGE, ANSWER, QUESTION, CHOICES = "image", "answer", "question", "choices"  # columns


class Row(NamedTuple):
    """One line of a file."""

    where: str  # for messages
    images: tuple[Path | bytes, ...]  # files, or encoded
    text: str
    answer: str | None


def samples_of_examples(
    name: str, rows: StreamedRows | None, model, options: DrawOptions, processor=None
) -> CalibrationData:
    """Draw image-text examples for the language part of a model of images and text.

    A row is what a user says with images in front and, if the row has it, what the model answers; the chat template of
    the processor puts them together. Where it has none, images, text and answer stand on lines of their own.

    Args:
        name: a ``.jsonl`` file. Columns: ``text`` or ``question``; ``image``, a path from the folder of the file, or a
            list of several, or nothing; perhaps ``answer``, a text, or a number among ``choices``, a list of texts.
        rows: a data set with these columns, and images in place of paths; ``name`` is then for messages.
        options: a row without ``text`` is read from ``question``.
        processor: in place of the model's own.

    Raises:
        DataError: the model takes no images, a row has no text, an image is gone or cannot be read, the processor makes
            nothing of a row, or more than the model's context (each named).
        OptionError: Pillow or what the processor needs is not installed.
        CheckpointError: there is no processor beside the weights, or the hub cannot be reached.
    """
    place, column, samples = path_of(name), options.text_column, options.num_samples
    name = place.name if rows is None else name
    if model.image_token is None:
        raise DataError(
            f"the {model.part.name} component of {model.name} takes no images with its text, and {name} has an image "
            "column; calibrate on text, or take the column out"
        )
    found = _rows(place, column) if rows is None else _rows_of_hub(rows, name, column, options.wanted)
    if not found:
        raise DataError(f"{name} has no rows; give one with text and images")
    chosen, fitted = some_of(name, "examples", found, samples, options.seed)
    maker = model.processors.processor if processor is None else processor
    examples = tuple(_example(row, maker, model) for row in chosen)
    origin, draw = (origin_of(place), "examples of the whole file") if rows is None else (rows.origin, rows.draw)
    return CalibrationData(
        examples[:fitted],
        name,
        origin,
        options.seed,
        examples[fitted:] or None,
        draw,
        wanted=samples,
        text_column=None if column == "text" else column,
    )


def has_images(path: str, source) -> bool:
    """Whether a ``.jsonl`` file names images: in any row, or, for a model that has no use for them, in the first. A
    data set on the hub does."""
    if path.startswith(HUB):
        return True
    file = path_of(path)
    if file.suffix.lower() != ".jsonl" or not file.is_file():
        return False
    rows = (
        json_row(line, where, file)
        for where, line in filled_lines(file)
        if f'"{IMAGE}"' in line or source.image_token is None
    )
    return any(
        isinstance(row, dict) and row.get(IMAGE) for row in islice(rows, 1 if source.image_token is None else None)
    )


def _rows(path: Path, column: str) -> list[Row]:
    return [
        _row(row, f"{path}, {where}", column)._replace(images=image_paths(row, where, path))
        for where, row in json_rows(path)
    ]


def _rows_of_hub(hub: StreamedRows, name: str, column: str, wanted: int) -> list[Row]:
    """The first ones of the stream, which is in a random order."""
    found = []
    for number, row in islice(hub.rows, wanted):
        where = f"{name}, row {number}"
        found.append(_row(row, where, column)._replace(images=encoded_images(row, where)))
    return found


def _row(row: Any, where: str, column: str) -> Row:
    """Without its images."""
    if column == "text" and isinstance(row, dict) and column not in row and QUESTION in row:
        column = QUESTION
    text = text_of(row, column, where)
    if not text.strip():
        raise DataError(f"{where}: column {column!r} is empty; every row needs a text")
    return Row(where, (), text, _answer(row, where))


def _answer(row: dict, where: str) -> str | None:
    """A text, or the number of one of several."""
    given, choices = row.get(ANSWER), row.get(CHOICES)
    if type(given) is int and isinstance(choices, list) and 0 <= given < len(choices):
        return text_of({CHOICES: choices[given]}, CHOICES, where)
    return text_of(row, ANSWER, where) if given is not None else None


def _example(row: Row, processor, source) -> Example:
    image_token = source.image_token  # an example must not keep the model
    example = Example.made_by(lambda: inputs_of(row, processor, image_token), row.where)
    try:
        check_fits((example,), source)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    return example


def inputs_of(row: Row, processor, image_token: int, *, asking: bool = False) -> Mapping[str, Tensor]:
    """Return the inputs of the model's forward, one example.

    Args:
        image_token: id of the token in whose places images stand.
        asking: the model is to answer, so the chat template ends with what stands before an answer.

    Raises:
        DataError: an image is gone or cannot be read, or the processor makes nothing of the row.
    """
    images = [_image(image, row.where) for image in row.images]
    try:
        made = _processed(row, images, processor, asking)
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        placeholders = int((inputs["input_ids"] == image_token).sum())
    except Exception as error:  # processors and templates of all families raise what they like
        raise DataError(
            f"{row.where}: the model's processor makes nothing of it ({first_line(error)}); correct the row, or the "
            "files of the processor next to the weights"
        ) from error
    if bool(placeholders) != bool(images):
        raise DataError(
            f"{row.where}: {plural(len(images), 'image')} became {plural(placeholders, 'image token')}; the text must "
            "not hold the token of images itself, and the processor's files must be those of the model"
        )
    return inputs


def _image(image: Path | bytes, where: str):
    if isinstance(image, bytes):
        return read_image(f"{where}, its image", image)
    if not image.is_file():
        raise DataError(f"{where}: its image {str(image)!r} is missing; put it there, or remove the row")
    return read_image(str(image), image)


def _processed(row: Row, images: list, processor, asking: bool) -> Mapping[str, Any]:
    if not getattr(processor, "chat_template", None):
        token = getattr(processor, "boi_token", None) or processor.image_token
        lines = [token * len(images), row.text, row.answer]
        text = "\n".join(line for line in lines if line)
        return processor(text=text, images=images or None, return_tensors="pt")
    shown = [{"type": "image", "image": image} for image in images]
    turns = [{"role": "user", "content": [*shown, {"type": "text", "text": row.text}]}]
    if row.answer is not None:
        turns.append({"role": "assistant", "content": [{"type": "text", "text": row.answer}]})
    return processor.apply_chat_template(
        turns, add_generation_prompt=asking, tokenize=True, return_dict=True, return_tensors="pt"
    )
