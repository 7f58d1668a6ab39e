"""Rows of files that can only be read as a whole: .json and .csv."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from .._utils.sizes import plural
from ..errors import DataError, option

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
LONGEST = 2**31 - 1  # characters of a field of a .csv file; the default of Python is shorter than many documents


def rows_of_json(content: str, place: str, columns: tuple[str, ...]) -> list[tuple[str, Any]] | None:
    """Read the rows of a .json file: a list of objects, an object that holds one, or one object with a text.

    Args:
        content: of the file.
        place: of the file, for messages.
        columns: an object with one of these is a row.

    Returns:
        Where each row stands, for messages, and the row; ``None`` where every line is a row of its own.

    Raises:
        DataError: it is not JSON, or has no rows.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # also numbers too long and brackets too deep for Python
        if getattr(error, "msg", None) == "Extra data":
            return None
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = getattr(error, "msg", str(error).partition(";")[0])
        raise DataError(f"{place}{at} is not JSON ({reason}); a list of rows is expected") from error
    if isinstance(found, dict):
        found = _rows_of_object(found, place, columns)
    if not isinstance(found, list):
        raise DataError(
            f"{place} holds one {type(found).__name__}; a list of rows is expected, each with a column of text"
        )
    return [(f"row {number}", row) for number, row in enumerate(found, 1)]


def _rows_of_object(found: dict, place: str, columns: tuple[str, ...]) -> list:
    if any(column in found for column in columns):
        return [found]
    lists = {
        name: rows for name, rows in found.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    if len(lists) == 1:
        return next(iter(lists.values()))
    raise DataError(
        f"{place} is an object with {'several lists' if lists else 'no list'} of rows in it (it has: "
        f"{', '.join(found)}); give the list of rows alone, or name the column of the text (use "
        f"{option('text_column')})"
    )


def rows_of_csv(
    content: str, place: str, delimiter: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Read the rows of a .csv or .tsv file, whose first line names the columns.

    Args:
        content: of the file.
        place: of the file, for messages.
        delimiter: between the fields of a row.
        columns: the first line names one of these, or else it may have another delimiter.

    Yields:
        The line where a row ends, for messages, and the row.

    Raises:
        DataError: it is not a table.
    """
    before = csv.field_size_limit(LONGEST)
    try:
        yield from _rows_of_table(content, place, delimiter, columns)
    finally:
        csv.field_size_limit(before)


def _rows_of_table(
    content: str, place: str, delimiter: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    lines = csv.reader(io.StringIO(content), delimiter=delimiter, strict=True)
    names = None
    try:
        for row in lines:
            if not row:
                continue
            if names is None:
                names = row
                if len(set(names)) < len(names):
                    raise DataError(f"{place} names a column twice in its first line ({', '.join(names)}); correct it")
                _check_delimiter(names, place, delimiter, columns)
                continue
            where = f"line {lines.line_num}"
            if len(row) != len(names):
                raise DataError(
                    f"{place}, {where} has {plural(len(row), 'field')} and the first line names "
                    f"{plural(len(names), 'column')}; correct it"
                )
            yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{place}, line {lines.line_num} is no row of a table ({error}); correct it") from error


def _check_delimiter(names: list[str], place: str, delimiter: str, columns: tuple[str, ...]) -> None:
    """Refuse a table whose first line is one name because its columns have another delimiter between them."""
    other = next((one for one in DELIMITERS if one != delimiter and one in names[0]), None)
    if len(names) == 1 and names[0] not in columns and other:
        raise DataError(
            f"{place} has {DELIMITERS[other]} between the columns of its first line ({names[0]}), and "
            f"{DELIMITERS[delimiter]} are expected; save it with {DELIMITERS[delimiter]}"
        )
