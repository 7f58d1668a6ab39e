"""Where calibration and evaluation text comes from.

A source is named by one string: a hub data set by alias (``wikitext2``), the same rows from a local copy
(``wikitext2:wiki.test.raw``), a local ``.txt``, ``.jsonl`` or ``.parquet`` file, or ``pydoc`` (the language reference that
ships with CPython: text on every machine). ``self``, text sampled from the model, is made in :mod:`.tokens`.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, DataError

__all__ = ["ALIASES", "HubText", "Text", "read_text"]


@dataclass(frozen=True)
class HubText:
    """A data set on the hub, in a form that needs no loading script."""

    path: str
    config: str | None
    splits: dict[str, str]  # "calibration" / "evaluation" -> split
    field: str
    revision: str | None = None
    data_files: dict[str, str] | None = None


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
        data_files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
    ),
    "alpaca": HubText("tatsu-lab/alpaca", None, {"calibration": "train", "evaluation": "train"}, "text"),
}


@dataclass(frozen=True)
class Text:
    """Documents in order, and where they came from."""

    name: str
    documents: tuple[str, ...]
    origin: str  # what two uses of the same text share: a hash of the path, or data set and split

    def joined(self) -> str:
        """One string, rows joined by a blank line, the way WikiText-2 perplexity is defined in the field."""
        return "\n\n".join(self.documents)


def read_text(name: str, *, use: str = "calibration", field: str = "text", characters: int | None = None) -> Text:
    """Read a text source.

    Args:
        name: alias, ``alias:local file``, ``pydoc``, or a ``.txt``, ``.jsonl`` or ``.parquet`` file.
        use: ``calibration`` or ``evaluation``; picks the split of a hub data set.
        field: the column with the text, for jsonl and parquet.
        characters: stop reading after about this many (a hub data set may be endless).

    Raises:
        DataError: unknown source, missing field, unreadable or empty file.
        CheckpointError: the hub cannot be reached.
    """
    alias, _, local = name.partition(":")
    if name == "pydoc":
        from pydoc_data.topics import topics

        documents: Iterable[str] = (topics[key] for key in sorted(topics))
        origin = "pydoc"
    elif alias in ALIASES and local:
        path = Path(local).expanduser()
        documents, origin = _rows_of_raw_file(path), _file_origin(path)
    elif name in ALIASES:
        documents, origin = _from_hub(name, use), f"{ALIASES[name].path}:{ALIASES[name].splits[use]}"
    else:
        path = Path(name).expanduser()
        documents, origin = _from_file(path, field), _file_origin(path)
    kept = _up_to(documents, characters)
    if not any(d.strip() for d in kept):
        raise DataError(f"text source {name!r} is empty; give a file with text, or one of {_choices()}")
    return Text(name, kept, origin)


def _file_origin(path: Path) -> str:
    """Tells files apart without telling a reader of the checkpoint where they lay."""
    return "file:" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


def _choices() -> str:
    return f"{', '.join(sorted(ALIASES))}, pydoc, self, or a .txt/.jsonl/.parquet file"


def _up_to(documents: Iterable[str], characters: int | None) -> tuple[str, ...]:
    kept, seen = [], 0
    for document in documents:
        kept.append(document)
        seen += len(document)
        if characters is not None and seen >= characters:
            break
    return tuple(kept)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no text at {str(path)!r}: expected {_choices()}")
    return path


def _read(path: Path) -> str:
    try:
        return _existing(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); convert it") from error


def _rows_of_raw_file(path: Path) -> tuple[str, ...]:
    """Rows as the hub's WikiText-2 has them: a line with its newline, or an empty string."""
    return tuple("" if not line.strip() else line + "\n" for line in _read(path).split("\n")[:-1])


def _from_file(path: Path, field: str) -> Iterable[str]:
    if path.suffix == ".jsonl":
        return tuple(_field_of(row, field, path) for row in _json_lines(path))
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet
        from pyarrow.lib import ArrowException

        try:
            table = parquet.read_table(_existing(path))
        except (ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file ({_first_line(error)})") from error
        if field not in table.column_names:
            raise DataError(f"{path} has no column {field!r}; it has: {', '.join(table.column_names)} (use --field)")
        rows = tuple(table[field].to_pylist())
        if not all(isinstance(row, str) for row in rows):
            raise DataError(
                f"{path}: column {field!r} is {table[field].type}, with rows that are not text (use --field)"
            )
        return rows
    return (_read(path),)


def _json_lines(path: Path) -> Iterable[dict]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON ({error.msg}); one object a line is expected"
                ) from error


def _field_of(row: dict, field: str, path: Path) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{path} has no text field {field!r}; a row has: {names} (use --field)")
    return row[field]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


def _from_hub(alias: str, use: str) -> Iterable[str]:
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
        for row in rows:
            yield row[hub.field]
    except Exception as error:  # network, hub and datasets errors share no base; all mean "not to be had"
        raise CheckpointError(
            f"cannot read {alias!r} ({hub.path}) from the hub ({_first_line(error)}); check the "
            f"connection, or give a local copy: {alias}:FILE (raw rows), or a .txt/.jsonl/.parquet file"
        ) from error
