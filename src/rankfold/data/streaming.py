"""Pieces of a text too large to be read or tokenised as a whole, in a seeded random order, none twice.

A local file is cut into slots of equal size. A slot of a ``.txt`` file is a piece; of a file with one row a line the
rows that BEGIN in a slot are its pieces, so every row belongs to one slot. Only the slots that are drawn are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .built_in import SOURCE_CODE
from .chats import Chat, column_read
from .hub import ALIASES, BUFFER, hub_rows
from .mixing import order_of
from .text import Text, decode, document_of, json_row, open_parquet, raw_row, read_text, text_source

LARGE = 16 * 2**20  # bytes of a file, characters of rows; what is smaller is tokenised as a whole


@dataclass(frozen=True)
class Pieces:
    """Random pieces of a text."""

    pieces: Iterator[str | Chat]
    origin: str
    draw: str  # how they were drawn, for the record


def text_or_pieces(name: str, *, column: str, seed: int, size: int) -> Text | Pieces:
    """Read a text source; of one that is too large to be tokenised as a whole return random pieces.

    Args:
        name, column: see :func:`~rankfold.data.text.read_text`.
        seed: of the order.
        size: characters wanted of a piece, where the source has no rows.

    Raises:
        DataError: here or on the way, see :func:`~rankfold.data.text.read_text`.
        CheckpointError: the hub cannot be reached.
    """
    source = text_source(name)
    if source.kind == "hub" and ALIASES[name].endless:
        return Pieces(hub_rows(name, "calibration", shuffle=seed), source.origin, f"stream, buffer of {BUFFER} rows")
    if name == SOURCE_CODE:  # all of it takes seconds to tokenise
        return Pieces(_stretches(read_text(name).joined(), seed, size), source.origin, f"spans of {size} characters")
    path, is_whole = source.path, source.kind in ("json", "csv", "tsv")  # which have no rows to find in the middle
    if path is None or is_whole or path.stat().st_size <= LARGE:
        text = read_text(name, column=column)
        return pieces_of_text(text, seed) or text
    if source.kind == "parquet":
        return Pieces(_parquet_rows(path, column, seed), source.origin, "rows")
    if source.kind == "txt":
        return Pieces(_spans(path, seed, size), source.origin, f"spans of {size} bytes")
    return Pieces(_rows(path, source.kind, column, seed, size), source.origin, f"rows of slots of {size} bytes")


def pieces_of_text(text: Text, seed: int) -> Pieces | None:
    """Documents of a text that was read but is too large to be tokenised; ``None`` where it is not."""
    if sum(map(len, text.documents)) <= LARGE:
        return None
    return Pieces((text.documents[i] for i in map(int, order_of(len(text.documents), seed))), text.origin, "rows")


def _slots(length: int, seed: int, size: int) -> Iterator[int]:
    """Return the beginnings of all slots in so many bytes or characters."""
    return (slot * size for slot in map(int, order_of(-(-length // size), seed)))


def _stretches(text: str, seed: int, size: int) -> Iterator[str]:
    return (text[begin : begin + size] for begin in _slots(len(text), seed, size))


def _spans(path: Path, seed: int, size: int) -> Iterator[str]:
    with path.open("rb") as file:
        for begin in _slots(path.stat().st_size, seed, size):
            file.seek(begin)
            yield decode(_whole_characters(file.read(size)), path)


def _whole_characters(data: bytes) -> bytes:
    """UTF-8 without the parts of a character that the cuts left at both ends."""
    first = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
    for back, byte in enumerate(reversed(data[-4:]), 1):
        if byte & 0xC0 != 0x80:  # the last character begins here; 110xxxxx has two bytes, 1110xxxx three, 11110xxx four
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[first : len(data) - back if length > back else len(data)]
    return data[first:]


def _rows(path: Path, kind: str, column: str, seed: int, size: int) -> Iterator[str | Chat]:
    with path.open("rb") as file:
        for begin in _slots(path.stat().st_size, seed, size):
            for where, line in _lines(file, begin, begin + size):
                text = decode(line, path).removesuffix("\n")
                if kind == "raw":
                    yield raw_row(text)
                elif text.strip():
                    yield document_of(json_row(text, f"byte {where}", path), column, f"{path}, byte {where}")


def _lines(file, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Lines whose first byte is in ``[begin, end)``, and where that is."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline(end - begin + 1)  # the rest of the line that holds the byte before, where it ends in the slot
    while (where := file.tell()) < end and (line := file.readline()):
        yield where, line


def _parquet_rows(path: Path, column: str, seed: int) -> Iterator[str | Chat]:
    """Yield rows in random order, a few thousand at a time, so that a row group is read once for all rows wanted."""
    from pyarrow.dataset import dataset

    with open_parquet(path, column) as file:
        read, rows = column_read(file.schema_arrow.names, column), dataset(path, format="parquet")
        for drawn in order_of(file.metadata.num_rows, seed).split(4096):
            found = rows.take(drawn.numpy(), columns=[read])[read].to_pylist()
            for number, row in zip(drawn.tolist(), found, strict=True):
                yield document_of({read: row}, read, f"{path}, row {number + 1}")
