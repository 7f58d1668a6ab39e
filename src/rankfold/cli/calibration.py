"""Options that say what a model is measured on."""

import contextlib
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ..data.hub import HUB
from ..errors import DataError, OptionError
from .options import Field

__all__ = ["CalibrationOptions"]


@dataclass(frozen=True)
class CalibrationOptions:
    """What text, or which images, a model is measured on."""

    calibration: Annotated[
        list[str],
        typer.Option(
            help="wikitext2, ptb, c4, alpaca (from the hub, or ALIAS:FILE for a local copy of the rows), a text file, a "
            ".jsonl/.json/.csv/.parquet file with rows of text or of chats (messages), pydoc (ships with Python), or self "
            "(text the model writes). Repeatable: texts are mixed in equal parts, or by TEXT=SHARE, e.g. a.txt=0.7 (a file of"
            " that very name is taken as the file). For a part that takes images: a folder of images, or a .parquet file. For"
            " a model of images and text, either part: a .jsonl file with the columns text or question, image (a path from "
            "there, or several) and perhaps answer, or hub:OWNER/NAME, a data set with such columns. With --parts: one of "
            "these for all, or PART=TEXT for each, e.g. language=wikitext2 and vision=images/."
        ),
    ] = ("wikitext2",)
    samples: Annotated[int, typer.Option(help="Calibration windows of all texts together, or images, or examples.")] = (
        128
    )
    length: Annotated[
        int, typer.Option(help="Tokens per window; clamped to the model's context. Examples are not cut.")
    ] = 2048
    seed: Annotated[int, typer.Option(help="Order in which windows are drawn.")] = 0
    field: Field = "text"

    def of_parts(self, names: list[str]) -> dict[str, "CalibrationOptions"]:
        """What each of these parts of a model is measured on.

        Raises:
            OptionError: not one file of image-text examples for all, and not something for each.
        """
        named = [(part, text) for part, equals, text in (text.partition("=") for text in self.calibration) if equals]
        texts = {name: [text for part, text in named if part == name] for name in names}
        if sum(map(len, texts.values())) == len(self.calibration) and all(texts.values()):
            # A column is one of the text; images are in the one that is called so.
            return {name: replace(self, calibration=given, field=self._field_of(name)) for name, given in texts.items()}
        only = self.calibration[0].lower()
        if len(self.calibration) == 1 and not any(texts.values()) and (only.endswith(".jsonl") or only.startswith(HUB)):
            return {name: replace(self, field=self._field_of(name)) for name in names}
        raise OptionError(
            "with --parts, --calibration takes one .jsonl file of image-text examples (or hub:OWNER/NAME), or PART=... for "
            f"each, e.g. --calibration language=wikitext2 --calibration vision=images/; got {' and '.join(self.calibration)}"
        )

    def _field_of(self, part: str) -> str:
        return self.field if part == "language" else "text"

    def load(self, source):
        """The windows, images or examples; see :func:`rankfold.load_tokens`, :func:`rankfold.load_images` and
        :func:`rankfold.load_examples`."""
        if source.part.takes_images:
            return self._images(source)
        from ..data.image_text import has_images

        texts = parse_texts(self.calibration)
        if any(has_images(name, source) for name in texts):
            return self._examples(source)
        from ..data.tokens import load_tokens

        options = {"samples": self.samples, "length": self.length, "seed": self.seed, "field": self.field}
        return load_tokens(texts, source, **options)

    def _examples(self, source):
        from ..data.image_text import load_examples

        if len(self.calibration) != 1:
            raise OptionError(
                f"--calibration takes one file of image-text examples and nothing beside it, got {len(self.calibration)}; put "
                "them into one"
            )
        return load_examples(
            *parse_texts(self.calibration), source, samples=self.samples, seed=self.seed, field=self.field
        )

    def _images(self, source):
        from ..data.images import load_images

        if len(self.calibration) != 1:
            raise OptionError(
                f"--calibration takes one folder of images, got {len(self.calibration)}; put them into one"
            )
        field = "image" if self.field == "text" else self.field
        return load_images(self.calibration[0], source, samples=self.samples, seed=self.seed, field=field)


def parse_texts(texts: list[str]) -> list[str] | dict[str, float]:
    """Names of texts, or name -> share where they are given as ``TEXT=SHARE``."""
    from ..data.mixing import check_distinct

    parsed = [_parse_share(text) for text in texts]
    names = [name for name, _ in parsed]
    if all(share is None for _, share in parsed):
        return names
    if any(share is None for _, share in parsed):
        raise OptionError(
            f"--calibration takes a share for every text or for none, e.g. a.txt=0.7 and b.txt=0.3; got {' and '.join(texts)}"
        )
    check_distinct(names, names)
    return dict(parsed)


def _parse_share(text: str) -> tuple[str, float | None]:
    """``a.txt=0.7`` in parts, unless a text has that very name."""
    from ..data.text import text_source

    name, _, share = text.rpartition("=")
    if not name:
        return text, None
    try:
        text_source(text)
    except DataError:
        with contextlib.suppress(ValueError):
            return name, float(share)
    return text, None
