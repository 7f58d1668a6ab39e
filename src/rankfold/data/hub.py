"""Data sets on the hub, by alias."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .._utils.hub_id import is_hub_id
from .._utils.reporting import asking_hub
from ..errors import DataError
from .built_in import BUILT_IN

BUFFER = 10_000  # rows that a shuffled stream holds to draw the next one from: some 20 MB of web text
HUB = "hub:"  # before the name of a data set with images


@dataclass(frozen=True)
class HubText:
    """A data set on the hub, in a form that needs no loading script."""

    path: str
    config: str | None
    splits: dict[str, str]  # "calibration" / "evaluation" -> split; the use that is not there is refused
    column: str
    revision: str | None = None
    data_files: dict[str, str | list[str]] | None = None
    endless: bool = False  # too large to be read to its end
    refused: str = ""  # why it is not for the other use; and what to give


# Of `languages`: as many as the shards from which `datasets` fills a buffer.
LANGUAGES = ("ar", "de", "es", "fr", "it", "ja", "ko", "pt", "ru", "zh")

ALIASES = {
    "wikitext2": HubText(
        "Salesforce/wikitext", "wikitext-2-raw-v1", {"calibration": "train", "evaluation": "test"}, "text"
    ),
    # The data set itself is a loading script, which `datasets` no longer runs; the hub keeps a converted copy.
    "ptb": HubText(
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        {"calibration": "train", "evaluation": "test"},
        "sentence",
        revision="refs/convert/parquet",
    ),
    "c4": HubText(
        "allenai/c4",
        None,
        {"calibration": "train", "evaluation": "validation"},
        "text",
        # Perplexity on C4 is measured on the first validation shard; calibration text comes from all training shards.
        data_files={"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"},
        endless=True,
    ),
    # One shard of each language, so that all have the same share; the first shard of some is three times as large. In
    # order, the rows of the first come before any other.
    "languages": HubText(
        "wikimedia/wikipedia",
        None,
        {"calibration": "train"},
        "text",
        data_files={"train": [f"20231101.{language}/train-00001-of-*.parquet" for language in LANGUAGES]},
        endless=True,
        refused="only shuffled rows are of all languages; give a file in each language",
    ),
    "alpaca": HubText("tatsu-lab/alpaca", None, {"calibration": "train", "evaluation": "train"}, "text"),
}


def hub_rows(alias: str, use: str, shuffle: int | None = None) -> Iterator[str]:
    """Rows of a hub data set, streamed; in their order, or shuffled.

    Args:
        alias: out of :data:`ALIASES`.
        use: ``calibration`` or ``evaluation``.
        shuffle: seed. The order of the shards is drawn, and the next row out of a buffer of :data:`BUFFER` rows, which
            `datasets` fills from several shards at a time.

    Raises:
        CheckpointError: the hub cannot be reached.
    """
    from datasets import load_dataset

    hub = ALIASES[alias]
    advice = (
        f"{alias}:FILE (raw rows), a file such as .txt or .jsonl, or what ships with Python: {' or '.join(BUILT_IN)}"
    )
    with _reaching(hub.path, f"{alias!r} ({hub.path})", advice):
        rows = load_dataset(
            hub.path,
            hub.config,
            split=hub.splits[use],
            revision=hub.revision,
            data_files=hub.data_files,
            streaming=True,
        )
        for row in rows if shuffle is None else rows.shuffle(seed=shuffle, buffer_size=BUFFER):
            yield row[hub.column]


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a data set with images, as they are encoded or opened."""

    rows: Iterable[tuple[int, Any]]  # with their numbers, in a random order
    origin: str  # data set and split
    draw: str  # how they are drawn, for the record


def image_text_rows(name: str, seed: int) -> StreamedRows:
    """The training split of a data set with images, streamed in a random order.

    Args:
        name: ``hub:OWNER/NAME``, or ``hub:OWNER/NAME:CONFIG`` of one that has several.
        seed: of the order, as for :func:`hub_rows`.

    Raises:
        DataError: it is no such name.
        CheckpointError: on the way, the hub cannot be reached, or there is no such data set.
    """
    path, _, config = name.removeprefix(HUB).partition(":")
    if not is_hub_id(path):
        raise DataError(f"no data set at {name!r}: expected {HUB}OWNER/NAME, or {HUB}OWNER/NAME:CONFIG")
    buffer = BUFFER // 10  # some 100 MB of images
    rows = enumerate(_image_text_rows(path, config or None, seed, buffer))
    return StreamedRows(rows, f"{name.removeprefix(HUB)}:train", f"stream, buffer of {buffer} rows")


def _image_text_rows(path: str, config: str | None, seed: int, buffer: int) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    with _reaching(path, repr(path), "a .jsonl file with paths of images"):
        rows = load_dataset(path, config, split="train", streaming=True)
        yield from rows.decode(False).shuffle(seed=seed, buffer_size=buffer)


@contextlib.contextmanager
def _reaching(path: str, what: str, instead: str) -> Iterator[None]:
    """One line for whatever comes up between here and the hub."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import HfApi

    advice = f"check the connection, or name what is here: {instead}"
    with asking_hub(f"datasets/{path}", f"cannot read {what} from the hub", advice):
        try:
            yield
        except DatasetNotFoundError:
            HfApi().auth_check(path, repo_type="dataset")  # raises what the hub has answered, which this error lacks
            raise
