"""Options that say what a model is measured on."""

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._utils.processes import launched_count
from ..data.built_in import DEFAULT_TEXT
from ..data.hub import HUB
from ..errors import DataError, OptionError
from .rules import MayBePath

if TYPE_CHECKING:
    from ..data.calibration_data import CalibrationData
    from ..models.dense_model import DenseModel


@dataclass(frozen=True)
class CalibrationOptions:
    """The text or images that a model is measured on."""

    panel: ClassVar = "Calibration"

    calibration: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT",
            help="mixture, wikitext2, ptb, c4, languages, alpaca, pydoc, python-source, self (the model writes), a "
            "file, images. Repeatable; shares: a.txt=0.7.",
        ),
        MayBePath(),
    ] = field(default_factory=lambda: [DEFAULT_TEXT])
    num_samples: Annotated[int, typer.Option(help="Samples of all texts together, or images, or examples.")] = 128
    max_length: Annotated[
        int, typer.Option(help="Tokens per sample, at most the model's context. Examples are not cut.")
    ] = 2048
    seed: Annotated[int, typer.Option(help="Order in which samples are drawn.")] = 0
    text_column: Annotated[str, typer.Option(help="Column of the text, or of the images, in a file with rows.")] = (
        "text"
    )
    shards: Annotated[
        int | None,
        typer.Option(
            help="Parts of the samples that are summed one by one; processes share them. Default: one a process."
        ),
    ] = None

    def of_components(self, names: list[str]) -> dict[str, "CalibrationOptions"]:
        """Return what each of these components of a model is measured on.

        Raises:
            OptionError: not one file of image-text examples for all, and not something for each.
        """
        texts: dict[str, list[str]] = {name: [] for name in names}
        for name, _, text in (text.partition("=") for text in self.calibration):
            if text and name in texts:
                texts[name].append(text)
        if not any(texts.values()) and len(self.calibration) == 1:
            only = self.calibration[0].lower()
            if only.endswith(".jsonl") or only.startswith(HUB):
                texts = dict.fromkeys(names, self.calibration)
        elif sum(map(len, texts.values())) != len(self.calibration):
            texts = {}
        if not texts or not all(texts.values()):
            raise OptionError(
                "with --components, --calibration takes one .jsonl file of image-text examples (or hub:OWNER/NAME), or "
                "COMPONENT=... for each, e.g. --calibration language=wikitext2 --calibration vision=images/; got "
                f"{' and '.join(self.calibration)}"
            )
        # A column is one of the text; images are in the one that is called so.
        columns = {name: self.text_column if name == "language" else "text" for name in names}
        return {name: replace(self, calibration=given, text_column=columns[name]) for name, given in texts.items()}

    def load(self, model: "DenseModel") -> "CalibrationData":
        """Load the samples; see :func:`rankfold.load_calibration`."""
        from ..data.load import load_calibration

        return load_calibration(
            parse_texts(self.calibration),
            model,
            num_samples=self.num_samples,
            max_length=self.max_length,
            seed=self.seed,
            text_column=self.text_column,
            shards=launched_count() if self.shards is None else self.shards,
        )

    def for_recovery(self, moments) -> dict:
        """Return what to train on: the same texts, or by default where the model is measured by moments."""
        texts = DEFAULT_TEXT if moments else parse_texts(self.calibration)
        return {"texts": texts, "seed": self.seed, "text_column": self.text_column}


def parse_texts(texts: list[str]) -> dict[str, float]:
    """Return the share of every text: equal ones, or as they are given as ``TEXT=SHARE``."""
    from ..data.mixing import check_distinct

    parsed = [_parse_share(text) for text in texts]
    names = [name for name, _ in parsed]
    check_distinct(names, names)
    if all(share is None for _, share in parsed):
        return dict.fromkeys(names, 1.0)
    if any(share is None for _, share in parsed):
        raise OptionError(
            f"--calibration takes a share for every text or for none, e.g. a.txt=0.7 and b.txt=0.3; "
            f"got {' and '.join(texts)}"
        )
    return {name: share for name, share in parsed if share is not None}


def _parse_share(text: str) -> tuple[str, float | None]:
    """Split ``a.txt=0.7``, unless a text has that very name."""
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
