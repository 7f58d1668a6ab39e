"""Sizes of files, lengths of time and counts, as people write them."""

import math
import re

from ..errors import OptionError, option

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kMGT])(i?))?B?", re.IGNORECASE)
POWERS = " kmgt"


def parse_size(size: int | str) -> int:
    """Return bytes: of a number, or of a text such as ``400MB`` (1e6 each) or ``1.5GiB`` (2^30).

    Raises:
        OptionError: no size, or less than a byte.
    """
    found = SIZE.fullmatch(str(size).strip())
    if found is None or isinstance(size, bool) or _bytes(found) < 1:
        raise OptionError(
            f"{option('target_size')} takes a size above 0, such as 400MB or 1.5GiB, or a number of bytes; got {size!r}"
        )
    return _bytes(found)


def _bytes(found: re.Match[str]) -> int:
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS.index((unit or " ").lower()))


def size_text(size: float) -> str:
    """Return bytes in a unit that suits them, powers of 1,000."""
    unit = next((unit for unit in ("GB", "MB", "kB") if size >= 0.999995 * _ONE[unit]), "bytes")  # or 1,000.00 kB
    return f"{size / _ONE[unit]:,.2f} {unit}" if unit in _ONE else f"{size:,.0f} bytes"


_ONE = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def rounded_down(fraction: float) -> str:
    """Return a fraction with four decimals that is no larger: whoever asks for what can be reached reaches it."""
    return f"{math.floor(1e4 * fraction + 1e-6) / 1e4:.4f}"  # 0.57 is 5699.999 of 1e4 in floating point


def plural(count: int, thing: str) -> str:
    """``1 sample``, ``2,048 tokens``; the name of one thing, whose plural ends in s."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
