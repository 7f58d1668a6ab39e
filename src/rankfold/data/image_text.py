"""Image-text examples for calibration, as a model's own processor gives them.

Shape legend: S examples, T tokens of one, those in whose places images stand among them.
"""

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import DataError, OptionError, first_line
from .batches import Example
from .hub import HUB, HubRows, image_text_rows
from .images import encoded_images, image_paths, read_image
from .mixing import held_out_of, some_of
from .text import field_of, json_row, json_rows, origin_of
from .tokens import check_fits
from .windows import Tokens

__all__ = ["Examples", "has_images", "load_examples"]

log = logging.getLogger(__name__)

IMAGE, ANSWER, QUESTION, CHOICES = "image", "answer", "question", "choices"  # columns


@dataclass(frozen=True)
class Examples(Tokens):
    """Image-text examples, in the place of windows of token ids. They have different lengths, and nothing is padded."""

    ids: tuple[Example, ...]  # (S,) what moments are measured on
    held_out: tuple[Example, ...] | None = None  # further examples of the same draw that nothing is fitted to
    draw: str = "examples of the whole file"

    def __post_init__(self):
        for name, examples in (("ids", self.ids), ("held_out", self.held_out)):
            if examples is not None and not (
                isinstance(examples, tuple) and examples and all(isinstance(e, Example) for e in examples)
            ):
                raise DataError(
                    f"{name} must be a tuple of examples (rankfold.load_examples), got {type(examples).__name__}"
                )

    @property
    def tokens(self) -> int:
        """Of all examples that are fitted."""
        return sum(example.tokens for example in self.ids)

    @property
    def length(self) -> int:
        """Mean, rounded down."""
        return self.tokens // len(self.ids)

    def describe(self) -> dict:
        return super().describe() | {
            "kind": "image-text examples",
            "tokens": self.tokens,
            "longest": max(example.tokens for example in self.ids),
            "with_images": sum(example.images for example in self.ids),
        }


class Row(NamedTuple):
    """One line of a file."""

    where: str  # for messages
    images: tuple[Path | bytes, ...]  # files, or encoded
    text: str
    answer: str | None


def load_examples(
    path: str | Path, source, *, samples: int = 128, seed: int = 0, field: str = "text", processor=None
) -> Examples:
    """Image-text examples for calibrating the language part of a model of images and text, drawn at random out of a file or a
    data set on the hub.

    A row is what a user says with images in front and, if the row has it, what the model answers; the chat template of the
    processor puts them together. Where it has none, images, text and answer stand on lines of their own. Examples are not cut.
    Behind the samples come a few more rows that are held out, as of texts (:func:`.load_tokens`); they are taken out of the
    samples where there are too few rows.

    Args:
        path: a ``.jsonl`` file. Columns: ``text`` or ``question``; ``image``, a path from the folder of the file, or a list of
            several, or nothing; perhaps ``answer``, a text, or a number among ``choices``, a list of texts. Or
            ``hub:OWNER/NAME``: the training split of a data set with these columns, and images in place of paths.
        source: an open model; its processor is used.
        samples: ``>= 1``.
        seed: of the draw.
        field: column with the text; ``question`` where a row has no ``text``.
        processor: in place of the one beside the weights.

    Raises:
        DataError: the model takes no images, a row has no text, an image is gone or cannot be read, the processor makes nothing
            of a row, or more than the model's context (each named).
        OptionError: ``samples`` out of range, or Pillow or what the processor needs is not installed.
        CheckpointError: there is no processor beside the weights, or the hub cannot be reached.
    """
    hub = image_text_rows(str(path), seed) if str(path).startswith(HUB) else None
    place = str(path) if hub else Path(path).expanduser()
    name = place if hub else place.name
    if samples < 1:
        raise OptionError(f"samples must be >= 1, got {samples}")
    if source.image_token is None:
        raise DataError(
            f"the {source.part.name} part of {source.name} takes no images beside its text, and {name} has an image "
            "column; calibrate on text, or take the column out"
        )
    rows = _rows_of_hub(hub, name, field, samples + held_out_of(samples)) if hub else _rows(place, field)
    if not rows:
        raise DataError(f"{place} has no rows; give one with text and images")
    chosen, fitted = some_of(name, "examples", rows, samples, seed)
    maker = source.processors.processor if processor is None else processor
    examples = tuple(_example(row, maker, source) for row in chosen)
    origin, draw = (hub.origin, hub.draw) if hub else (origin_of(place), Examples.draw)
    facts = {"field": None if field == "text" else field, "wanted": samples}
    return Examples(examples[:fitted], name, origin, seed, examples[fitted:] or None, draw, **facts)


def has_images(path: str, source) -> bool:
    """Whether a ``.jsonl`` file names images: in any row, or, for a model that has no use for them, in the first. A data set
    on the hub does."""
    if path.startswith(HUB):
        return True
    file = Path(path).expanduser()
    if file.suffix.lower() != ".jsonl" or not file.is_file():
        return False
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        filled = ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
        rows = (
            json_row(line, where, file) for where, line in filled if f'"{IMAGE}"' in line or source.image_token is None
        )
        return any(
            isinstance(row, dict) and row.get(IMAGE) for row in islice(rows, 1 if source.image_token is None else None)
        )


def _rows(path: Path, field: str) -> list[Row]:
    if not path.is_file():
        raise DataError(f"no image-text examples at {str(path)!r}: expected a .jsonl file")
    return [
        _row(row, f"{path}, {where}", field)._replace(images=image_paths(row, where, path))
        for where, row in json_rows(path)
    ]


def _rows_of_hub(hub: HubRows, name: str, field: str, wanted: int) -> list[Row]:
    """The first ones of the stream, which is in a random order."""
    found = []
    for number, row in enumerate(islice(hub.rows, wanted)):
        where = f"{name}, row {number}"
        found.append(_row(row, where, field)._replace(images=encoded_images(row, where)))
    return found


def _row(row: Any, where: str, field: str) -> Row:
    """Without its images."""
    column = QUESTION if field == "text" and isinstance(row, dict) and field not in row and QUESTION in row else field
    text = field_of(row, column, where)
    if not text.strip():
        raise DataError(f"{where}: column {column!r} is empty; every row needs a text")
    return Row(where, (), text, _answer(row, where))


def _answer(row: dict, where: str) -> str | None:
    """A text, or the number of one of several."""
    given, choices = row.get(ANSWER), row.get(CHOICES)
    if type(given) is int and isinstance(choices, list) and 0 <= given < len(choices):
        return field_of({CHOICES: choices[given]}, CHOICES, where)
    return field_of(row, ANSWER, where) if given is not None else None


def _example(row: Row, processor, source) -> Example:
    image_token = source.image_token  # an example must not keep the model
    example = Example.made_by(lambda: _inputs(row, processor, image_token), row.where)
    try:
        check_fits((example,), source)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    return example


def _inputs(row: Row, processor, image_token: int) -> Mapping[str, Tensor]:
    """Of the model's forward, one example."""
    images = [_image(image, row.where) for image in row.images]
    try:
        made = _processed(row, images, processor)
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        placeholders = int((inputs["input_ids"] == image_token).sum())
    except Exception as error:  # processors and templates of all families raise what they like
        raise DataError(
            f"{row.where}: the model's processor makes nothing of it ({first_line(error)}); correct the row, or the files of "
            "the processor beside the weights"
        ) from error
    if bool(placeholders) != bool(images):
        raise DataError(
            f"{row.where}: {len(images)} images became {placeholders} image tokens; the text must not hold the token of images "
            "itself, and the processor's files must be those of the model"
        )
    return inputs


def _image(image: Path | bytes, where: str):
    if isinstance(image, bytes):
        return read_image(f"{where}, its image", io.BytesIO(image))
    if not image.is_file():
        raise DataError(f"{where}: its image {str(image)!r} is gone; put it there, or remove the row")
    return read_image(str(image), image)


def _processed(row: Row, images: list, processor) -> Mapping[str, Any]:
    if not getattr(processor, "chat_template", None):
        token = getattr(processor, "boi_token", None) or processor.image_token
        lines = [token * len(images), row.text, row.answer]
        text = "\n".join(line for line in lines if line)
        return processor(text=text, images=images or None, return_tensors="pt")
    shown = [{"type": "image", "image": image} for image in images]
    turns = [{"role": "user", "content": [*shown, {"type": "text", "text": row.text}]}]
    if row.answer is not None:
        turns.append({"role": "assistant", "content": [{"type": "text", "text": row.answer}]})
    return processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
