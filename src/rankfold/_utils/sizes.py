"""Sizes of files, lengths of time and counts, as people write them."""

import re

from ..errors import OptionError, option

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kMGT])(i?))?B?", re.IGNORECASE)
POWERS = " kmgt"


def parse_size(size: int | str) -> int:
    """Return bytes: of a number, or of a text such as ``400MB`` (1e6 each) or ``1.5GiB`` (2^30).

    Raises:
        OptionError: no size, or none above 0.
    """
    found = SIZE.fullmatch(str(size).strip())
    if found is None or isinstance(size, bool) or float(found[1]) <= 0:
        raise OptionError(
            f"{option('target_size')} takes a size above 0, such as 400MB or 1.5GiB, or a number of bytes; got {size!r}"
        )
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS.index((unit or " ").lower()))


def size_text(size: float) -> str:
    """Return bytes in a unit that suits them, powers of 1,000."""
    unit = next((unit for unit in ("GB", "MB", "kB") if size >= 0.999995 * _ONE[unit]), "bytes")  # or 1,000.00 kB
    return f"{size / _ONE[unit]:,.2f} {unit}" if unit in _ONE else f"{size:,.0f} bytes"


_ONE = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def plural(count: int, thing: str) -> str:
    """``1 sample``, ``2,048 tokens``; the name of one thing, whose plural ends in s."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
