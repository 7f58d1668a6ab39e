"""Where calibration and evaluation text comes from.

A source is named by one string: a hub data set by alias (``wikitext2``), the same rows from a local copy
(``wikitext2:wiki.test.raw``), a local file, or what ships with Python and so is on every machine, ``pydoc`` (the
language reference) or ``python-source`` (the standard library). A ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or
``.parquet`` file has rows, of text or of chats; any other file is one text. ``self``, text sampled from the model, is
made in :mod:`.tokens`. What is too large to be read as a whole is drawn from in :mod:`.streaming`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, first_line, option, suggestion
from .built_in import BUILT_IN, MIXTURES
from .chats import CHATS, Chat, chat_of, column_read, has_half_character, is_chat, written
from .hub import ALIASES, hub_rows
from .rows import rows_of_csv, rows_of_json

LONGEST_NAME = 255  # characters of a file's name; what is longer is a text
KINDS = {  # of files with rows, by suffix; any other file is one text
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
UNREADABLE: dict[str, str] = {
    **dict.fromkeys(
        [".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar"],
        "is packed; unpack it and give the file inside",
    ),
    **dict.fromkeys([".arrow", ".feather"], "is an Arrow file; save the rows as .parquet"),
    **dict.fromkeys([".xls", ".xlsx", ".ods"], "is a spreadsheet; save it as .csv"),
}


@dataclass(frozen=True)
class Text:
    """Documents in order, and where they came from."""

    name: str
    documents: tuple[str | Chat, ...]
    origin: str  # what two uses of the same text share: a hash of the path, or data set and split

    @property
    def has_chats(self) -> bool:
        """Whether the documents are chats."""
        return isinstance(self.documents[0], Chat)

    def joined(self, tokenizer=None, model: str = "the model") -> str:
        """Return one string: rows joined by a blank line, the way WikiText-2 perplexity is defined, and chats as
        the chat template of a model ends them.

        Args:
            tokenizer: of the model; only chats need it.
            model: its name, for messages.

        Raises:
            DataError: the tokenizer has no chat template, or the template does not take a chat.
        """
        return ("" if self.has_chats else "\n\n").join(written(one, tokenizer, model) for one in self.documents)


@dataclass(frozen=True)
class TextSource:
    """What the name of a text source means."""

    kind: str  # built-in, hub, raw (rows as the hub's WikiText-2 has them, one a line), txt, or one of KINDS
    origin: str
    path: Path | None = None


def text_source(name: str, use: str = "calibration") -> TextSource:
    """What ``name`` means; see :func:`read_text`.

    Raises:
        DataError: neither known nor a file, not for this use, or a file that cannot be read as text.
    """
    alias, _, local = name.partition(":")
    if name in BUILT_IN:
        return TextSource("built-in", name)
    if name in MIXTURES:
        raise DataError(f"{name!r} is several texts where one is read; name one of {_choices(use)}")
    if name == "self":
        raise DataError(f"'self' is what the model itself writes, not for {use}; name one of {_choices(use)}")
    if name in ALIASES and use not in ALIASES[name].splits:
        raise DataError(f"{name!r} is not for {use}: {ALIASES[name].refused}, or one of {_choices(use)}")
    if name in ALIASES:
        return TextSource("hub", f"{ALIASES[name].path}:{ALIASES[name].splits[use]}")
    raw = alias in ALIASES and local
    path = path_of(local if raw else name)
    if len(path.name) > LONGEST_NAME or "\n" in name:
        raise DataError(f"no text at {name[:40]!r}…: a text itself is given in a list, or as a file")
    if not _is_readable(path):
        hint = suggestion(name, _names(use))
        other = " (it is a folder; give a file in it)" if path.is_dir() and name else ""
        if path.exists() and not path.is_dir():  # read twice or more, which pipes and devices cannot be
            other = " (it is a pipe or a device; write the text to a file)"
        raise DataError(f"no text at {str(path)!r}{other}: {hint}expected {_choices(use)}")
    return TextSource(_kind_of(path, bool(raw)), origin_of(path), path)


def _is_readable(path: Path) -> bool:
    """Tell whether there is an ordinary file; :class:`DataError` where it may not be read."""
    try:
        if path.is_file():
            path.open("rb").close()
            return True
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); change its permissions, or give a copy") from error
    return False


def _kind_of(path: Path, raw: bool) -> str:
    suffix = path.suffix.lower()
    if suffix in UNREADABLE:
        raise DataError(f"{path} {UNREADABLE[suffix]}")
    if raw and suffix in KINDS:
        raise DataError(
            f"{path} is no file of raw rows, one a line; give {path.name} by itself, without an alias before it"
        )
    return "raw" if raw else KINDS.get(suffix, "txt")


def named_column(names: Iterable[str], column: str) -> str | None:
    """The column that was read of any of these texts; ``None`` where it is the usual one, or none of them has any."""
    kinds = [text_source(name).kind for name in names if name != "self"] if column != "text" else []
    return column if {*KINDS.values()} & {*kinds} else None


def path_of(name: str) -> Path:
    """Return the path that a name means; ``~`` of nobody is a folder of that name."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def origin_of(path: Path) -> str:
    """Tells files and folders apart without telling a reader of the checkpoint where they lay."""
    return "file:" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


def read_text(name: str, *, use: str = "calibration", column: str = "text", characters: int | None = None) -> Text:
    """Read a text source from its beginning.

    Args:
        name: alias, ``alias:local file``, ``pydoc``, ``python-source``, or a file: ``.jsonl``, ``.json`` (a list of
            rows, or an object that holds one), ``.csv``, ``.tsv`` or ``.parquet`` with rows, any other as one text.
        use: ``calibration`` or ``evaluation``; picks the split of a hub data set.
        column: the column with the text, of a file with rows. Where a row has no ``text`` but ``messages`` (turns with
            ``role`` and ``content``) or ``conversations`` (``from`` and ``value``), it is a chat.
        characters: stop reading after about this many (a hub data set may be endless).

    Raises:
        DataError: unknown source, missing column, unreadable or empty file.
        CheckpointError: the hub cannot be reached.
    """
    source = text_source(name, use)
    kept = _up_to(_documents(source, name, use, column), characters)
    if not any(isinstance(d, Chat) or d.strip() for d in kept):
        raise DataError(f"text source {name!r} is empty; give a file with text, or one of {_choices(use)}")
    return Text(name, kept, source.origin)


def _documents(source: TextSource, name: str, use: str, column: str) -> Iterable[str | Chat]:
    if source.kind == "built-in":
        return BUILT_IN[name]()
    path = source.path
    if path is None:
        return hub_rows(name, use)
    if source.kind == "parquet":
        return _rows_of_parquet(path, column)
    if source.kind in KINDS.values():
        return (document_of(row, column, f"{path}, {where}") for where, row in _rows(path, source.kind, column))
    text = decode(path.read_bytes(), path)
    return (text,) if source.kind == "txt" else (raw_row(line) for line in text.removesuffix("\n").split("\n"))


def _rows(path: Path, kind: str, column: str) -> Iterable[tuple[str, Any]]:
    """Return the rows of a file, with where they stand in it."""
    if kind == "jsonl":
        return json_rows(path)
    content = decode(path.read_bytes(), path)
    if kind != "json":
        return rows_of_csv(content, str(path), "\t" if kind == "tsv" else ",", (column, *CHATS))
    rows = rows_of_json(content, str(path), (column, *CHATS))
    return json_rows(path) if rows is None else rows


def _names(use: str) -> list[str]:
    aliases = sorted(name for name, hub in ALIASES.items() if use in hub.splits)
    return [*aliases, *BUILT_IN, *(["self", *MIXTURES] if use == "calibration" else [])]


def _choices(use: str) -> str:
    return f"{', '.join(_names(use))}, or a .txt/.jsonl/.json/.csv/.tsv/.parquet file"


def _up_to(documents: Iterable[str | Chat], characters: int | None) -> tuple[str | Chat, ...]:
    kept, seen = [], 0
    for document in documents:
        kept.append(document)
        seen += len(document)
        if characters is not None and seen >= characters:
            break
    return tuple(kept)


def decode(data: bytes, path: Path) -> str:
    """UTF-8 with any line ends, with or without a mark in front; :class:`DataError` where it is not."""
    if 4 * data.count(0) > len(data):  # Latin letters in UTF-16 are valid UTF-8, with zeros between them
        raise DataError(f"{path} is UTF-16 or UTF-32, or no text; convert it to UTF-8")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); convert it") from error


def raw_row(line: str) -> str:
    """A line as the hub's WikiText-2 has it: with its newline, or an empty string."""
    return "" if not line.strip() else line + "\n"


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row of a .jsonl file with the line it stands in, for messages; no more is read than is asked for."""
    return ((where, json_row(line, where, path)) for where, line in filled_lines(path))


def filled_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every line that holds something, and its number for messages; no more is read than is asked for."""
    with path.open("rb") as file:
        lines = (line for raw in file for line in decode(raw, path).removesuffix("\n").split("\n"))
        yield from ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


def json_row(line: str, where: str, path: Path) -> Any:
    """One line of a .jsonl file."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers too long and brackets too deep for Python
        reason = getattr(error, "msg", str(error).partition(";")[0])
        raise DataError(f"{path}, {where} is not JSON ({reason}); one object a line is expected") from error


def document_of(row: Any, column: str, where: str) -> str | Chat:
    """Return the text of a row, or its chat; ``where``: file and row, for messages."""
    read = column_read(row, column) if isinstance(row, dict) else column
    if isinstance(row, dict) and is_chat(row.get(read)):
        return chat_of(row[read], where)
    if read != column:
        kind = "an empty list" if row[read] == [] else type(row[read]).__name__
        raise DataError(
            f"{where} has no text column {column!r}, and {read!r} holds {kind}, not a list of turns {use_column()}"
        )
    return text_of(row, read, where)


def text_of(row: Any, column: str, where: str) -> str:
    """The text of a row; ``where``: file and row, for messages."""
    if not isinstance(row, dict) or column not in row:
        names = f"has: {', '.join(row)}" if isinstance(row, dict) else f"is a {type(row).__name__}, not an object"
        raise DataError(f"{where} has no text column {column!r}; the row {names} {use_column()}")
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r} holds {type(text).__name__}, not text {use_column()}")
    if has_half_character(text):
        raise DataError(
            f"{where}: column {column!r} has half a character (a lone surrogate) in it; write the file as UTF-8"
        )
    return text


def use_column() -> str:
    """Return the advice to name another column."""
    return f"(use {option('text_column')})"


@contextlib.contextmanager
def open_parquet(path: Path, column: str) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile`` with this ``column``; :class:`DataError` where it has none or is damaged."""
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column_read(names, column) not in names:
                raise DataError(f"{path} has no column {column!r}; it has: {', '.join(names)} {use_column()}")
            yield file
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({first_line(error)})") from error


def _rows_of_parquet(path: Path, column: str) -> list[str | Chat]:
    with open_parquet(path, column) as file:
        read = column_read(file.schema_arrow.names, column)
        rows = file.read(columns=[read])[read].to_pylist()
    return [document_of({read: row}, read, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
