"""Several calibration texts as one: how many windows each gives, and in what order they come.

Shape legend: S samples (windows), T window length.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .._utils.sizes import plural
from ..errors import OptionError, option
from .built_in import MIXTURES

log = logging.getLogger(__name__)

Row = TypeVar("Row")

FINEST = 10**6  # largest denominator of a share: two thirds, not 0.6666666666666666, so that ties are ties


@dataclass(frozen=True)
class DrawOptions:
    """How many samples are drawn, of what length, in what order, and from which column.

    Raises:
        OptionError: a number is out of range.
    """

    num_samples: int
    max_length: int
    seed: int
    text_column: str

    def __post_init__(self):
        if self.num_samples < 1 or self.max_length < 2:
            names = option("num_samples"), option("max_length")
            raise OptionError(
                f"{names[0]} must be >= 1 and {names[1]} >= 2, got {self.num_samples} and {self.max_length}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise OptionError(f"seed must fit into 64 bits, got {str(self.seed)[:24]}...; choose a smaller number")

    @property
    def wanted(self) -> int:
        """Return the number of samples to draw, those that are held out among them."""
        return self.num_samples + held_out_of(self.num_samples)

    @property
    def image_column(self) -> str:
        """Return the column of the images of a part that takes nothing else."""
        return "image" if self.text_column == "text" else self.text_column


class Portion(NamedTuple):
    """How many windows of a text."""

    fitted: int
    held_out: int


class Drawn(NamedTuple):
    """Windows of one text."""

    windows: Tensor  # (S, T) in the order drawn, perhaps fewer than were asked for
    origin: str
    draw: str  # how they were drawn, for the record


def held_out_of(samples: int) -> int:
    """Windows that are held out beside ``samples`` fitted ones: one for eight, at least one and at most 8."""
    return max(1, min(8, samples // 8))


def planned_samples(samples: int, length: int) -> dict[str, int]:
    """Describe a calibration set of full samples that is not drawn yet, as far as memory and time depend on it."""
    held_out = held_out_of(samples)
    return {"num_samples": samples, "max_length": length, "tokens": samples * length, "held_out": held_out}


def some_of(
    name: str, what: str, rows: Sequence[Row], samples: int, seed: int, beside: Callable[[int], int] = held_out_of
) -> tuple[list[Row], int]:
    """Rows in a random order, as many as are wanted or there are, and how many of them are fitted.

    Args:
        name, what: of the rows, for the log.
        samples: rows to fit.
        beside: how many are held out beside so many fitted ones; taken out of these where there are too few rows.
    """
    wanted = samples + beside(samples)
    chosen = [rows[i] for i in order_of(len(rows), seed)[:wanted].tolist()]
    if len(chosen) < wanted:
        log.info("%s has %d %s, not %d", name, len(chosen), what, wanted)
    return chosen, fitted_of(len(chosen), samples, beside)


def order_of(count: int, seed: int) -> Tensor:
    """Return the random order of so many rows."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def fitted_of(count: int, samples: int, beside: Callable[[int], int] = held_out_of) -> int:
    """Return how many of the first ``count`` rows are fitted and not held out; arguments as for :func:`some_of`."""
    return max(1, min(samples, count - beside(min(samples, count))))


def shares_of(texts: str | Path | Iterable[str | Path] | Mapping[str | Path, float]) -> dict[str, float]:
    """Name of a text -> its share; all shares add up to one.

    Args:
        texts: one name, several names for equal shares, or name -> share, of which only the proportions count.

    Raises:
        OptionError: no text, one that is named twice, or a share that is no positive number.
    """
    listed = [texts] if isinstance(texts, str | Path) else texts
    if not isinstance(listed, Mapping | Sequence) or not all(isinstance(name, str | Path) for name in listed):
        raise OptionError(f"calibration texts are a name, a list of names, or name: share; got {str(texts)[:60]!r}")
    names = [*map(str, listed)]
    if not names:
        raise OptionError("no calibration text is named; give at least one")
    check_distinct(names, names)
    given = dict(zip(names, texts.values() if isinstance(texts, Mapping) else [1] * len(names), strict=True))
    for name, share in given.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
            got = " ".join(repr(share).split())[:60]
            raise OptionError(f"the share of calibration text {name!r} must be a number above 0, got {got}")
    whole = sum(map(Fraction, given.values()))
    return {name: float(Fraction(share) / whole) for name, share in given.items()}


def expanded(shares: dict[str, float]) -> dict[str, float]:
    """Return the share of every single text, with those of a named mixture in its place.

    Args:
        shares: of :func:`shares_of`.

    Raises:
        OptionError: a text is named that a mixture holds already.
    """
    single = [
        (text, share * part) for name, share in shares.items() for text, part in MIXTURES.get(name, {name: 1.0}).items()
    ]
    names = [name for name, _ in single]
    check_distinct(names, names)
    return dict(single)


def check_distinct(names: list[str], origins: list[str]) -> None:
    """Raise :class:`OptionError` where two texts of a mix are one: what one holds out the other would be fitted to."""
    for name, origin in zip(names, origins, strict=True):
        if origins.count(origin) > 1:
            raise OptionError(f"calibration text {name!r} is named more than once; name it once, with a larger share")


def draw_all(
    shares: dict[str, float], samples: int, length: int, draw: Callable[[str, Portion, int], Drawn]
) -> dict[str, tuple[Drawn, Portion]]:
    """Windows of all texts, all of one length, and how many of each are fitted and held out.

    What a text lacks the others give. Where one does not fill a window all windows become as short as it needs.

    Args:
        shares: of :func:`shares_of`.
        samples: windows to fit, at least as many as texts.
        length: T.
        draw: windows of a text by name, as many as a portion holds, of a length; more begin with the fewer.
    """
    room: dict[str, float] = dict.fromkeys(shares, math.inf)  # windows a text has, as far as that is known
    drawn: dict[str, Drawn] = {}
    while True:
        wanted = dict(zip(shares, portions(samples, [*shares.values()], [*room.values()]), strict=True))
        missing = [n for n in shares if n not in drawn or min(sum(wanted[n]), room[n]) > len(drawn[n].windows)]
        if not missing:
            return {name: (drawn[name], wanted[name]) for name in shares}
        for name in missing:
            drawn[name] = draw(name, wanted[name], length)
            if (found := len(drawn[name].windows)) < sum(wanted[name]):
                room[name] = found
                if len(shares) > 1:
                    log.info(
                        "%s fills %s, not %d; other texts give the rest",
                        name,
                        plural(found, "sample"),
                        sum(wanted[name]),
                    )
        shortest = min(drawn, key=lambda name: drawn[name].windows.shape[1])
        if (shorter := drawn[shortest].windows.shape[1]) < length:
            if len(shares) > 1:
                log.info("samples of all texts have %d tokens, the length of those of %s", shorter, shortest)
            length = shorter
            drawn = {name: text for name, text in drawn.items() if text.windows.shape[1] == length}
            room = {name: room[name] if name in drawn else math.inf for name in shares}


def portions(samples: int, shares: list[float], room: list[float]) -> list[Portion]:
    """Windows wanted of every text, the fitted and the held-out ones in the same proportions.

    Every text is fitted; every text is held out too, where it has two windows and as many are held out as there are
    texts.

    Args:
        samples: windows to fit in total, at least as many as texts.
        shares: of the texts.
        room: windows every text has, at least one; infinity where there are enough.
    """
    held_out = held_out_of(samples)
    if sum(room) < samples + held_out:
        total = int(sum(room))
        held_out = min(held_out_of(min(samples, total)), total - len(room))
        samples = total - held_out
    apart = spread(held_out, shares, [windows - 1 for windows in room])
    fitted = spread(samples, shares, [windows - out for windows, out in zip(room, apart, strict=True)])
    return [Portion(*counts) for counts in zip(fitted, apart, strict=True)]


def spread(total: int, shares: list[float], room: list[float]) -> list[int]:
    """Whole numbers in proportion to ``shares`` that add up to ``total``, none above its ``room``.

    What rounding down leaves goes, one by one, to whom it brings closest to its share (Webster's method). Nobody goes
    away empty where there is enough for all.

    Args:
        total: at most the sum of ``room``.
    """
    parts = [Fraction(share).limit_denominator(FINEST) for share in shares]
    counts = [int(min(most, total * part / sum(parts))) for part, most in zip(parts, room, strict=True)]
    for _ in range(total - sum(counts)):
        not_full = [i for i, count in enumerate(counts) if count < room[i]]
        counts[max(not_full, key=lambda i: parts[i] / (2 * counts[i] + 1))] += 1
    if total >= len(counts):
        for i in [i for i, count in enumerate(counts) if not count and room[i]]:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    return counts


def interleaved(windows: list[Tensor], seed: int) -> Tensor:
    """``(sum of S, T)`` windows of all texts in a random order of texts; those of one text keep their order.

    Args:
        windows: ``(S, T)`` of every text.
        seed: of the order.
    """
    text = torch.cat([torch.full((len(some),), i) for i, some in enumerate(windows)])
    text = text[order_of(len(text), seed)]
    mixed = windows[0].new_empty(len(text), windows[0].shape[1])
    for i, some in enumerate(windows):
        mixed[text == i] = some
    return mixed
