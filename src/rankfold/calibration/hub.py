"""Data sets on the hub, by alias."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CheckpointError, first_line

__all__ = ["ALIASES", "BUFFER", "HubText", "hub_rows"]

BUFFER = 10_000  # rows that a shuffled stream holds to draw the next one from: some 20 MB of web text


@dataclass(frozen=True)
class HubText:
    """A data set on the hub, in a form that needs no loading script."""

    path: str
    config: str | None
    splits: dict[str, str]  # "calibration" / "evaluation" -> split
    field: str
    revision: str | None = None
    data_files: dict[str, str] | None = None
    endless: bool = False  # too large to be read to its end


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
    try:
        rows = load_dataset(
            hub.path,
            hub.config,
            split=hub.splits[use],
            revision=hub.revision,
            data_files=hub.data_files,
            streaming=True,
        )
        for row in rows if shuffle is None else rows.shuffle(seed=shuffle, buffer_size=BUFFER):
            yield row[hub.field]
    except Exception as error:  # network, hub and datasets errors share no base; all mean "not to be had"
        raise CheckpointError(
            f"cannot read {alias!r} ({hub.path}) from the hub ({first_line(error)}); check the connection, or give a "
            f"local copy: {alias}:FILE (raw rows), or a .txt/.jsonl/.parquet file"
        ) from error
