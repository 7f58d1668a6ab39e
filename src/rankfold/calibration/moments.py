"""Streaming second moments: sums over batches.

Shape legend: N width of what is measured, H heads, n rows (tokens) of a batch.

Precision policy of the statistics, in this one place: products in fp32 (bf16 activations multiply exactly in it), sums
of a batch and of a few batches too, beyond that in fp64; saved as fp32. On real activations the fp32 sums of four
batches add hardly any error to that of one (docs/results/moment_precision.md).
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._utils.hardware import multiplies_bf16_fast
from .._utils.processes import collect, process_count
from ..errors import NumericsError, option
from ..linalg.psd import all_finite

TILE = 512  # rows of a product x^T x; of every tile only the part on and above the diagonal is computed
ROUNDING = 32 * torch.finfo(torch.float32).eps  # of a sum of squares in fp32, relative: up to 20 were measured
NO_OWNERS: Mapping[str, int] = MappingProxyType({})
FP32_ROWS = 8192  # are summed in fp32 before they go to the fp64 sum, which is twice as wide and slow to reach


@dataclass
class Moment:
    """Sums over ``count`` observations of a vector ``x`` (or of one per head); ``None`` for those not asked for."""

    count: float
    total: Tensor | Any = None  # (..., N) sum of x
    absolute: Tensor | Any = None  # (..., N) sum of |x|; only where a diagonal l1 pre-conditioner may want it
    second: Tensor | Any = None  # (..., N, N) sum of x x^T
    rows: Tensor | Any = None  # (n, N) observations themselves, where a method iterates on them
    # (S, N) sum of x over each of S windows, times the root of mean length over own; where a method asks for it
    windows: Tensor | Any = None

    @property
    def mean(self) -> Tensor:
        return self.total.double() / self.count

    @property
    def mean_absolute(self) -> Tensor:
        return self.absolute.double() / self.count

    def second_moment(self) -> Tensor:
        """``E[x x^T]``, fp64; a copy."""
        return self.second.to(torch.float64, copy=True).div_(self.count)

    def covariance(self) -> Tensor:
        """``E[x x^T] - mean mean^T``, fp64; not clamped, so eigenvalues may be negative in the last digits."""
        return self.about(self.mean)

    def about(self, point: Tensor) -> Tensor:
        """``E[(x - point)(x - point)^T]``, fp64; with the mean of a fit, what that fit leaves on other observations.

        Products are summed in fp32, so of an entry of ``x`` that never varies rounding would be left: it is zero here.
        """
        mean, second = self.mean, self.second_moment()
        rounding = ROUNDING * second.diagonal(dim1=-2, dim2=-1)
        cross = mean.unsqueeze(-1) * point.unsqueeze(-2)
        found = second.sub_(cross).sub_(cross.mT).add_(point.unsqueeze(-1) * point.unsqueeze(-2))
        varies = (found.diagonal(dim1=-2, dim2=-1) > rounding).to(found.dtype)
        return found.mul_(varies.unsqueeze(-1)).mul_(varies.unsqueeze(-2))

    def within_windows(self) -> Tensor:
        """Mean over the windows of the covariance within each, fp64: pooled, divided by counts; not clamped."""
        # (S, N) means, each times the root of the window's length over the mean length: a longer one counts for more
        means = self.windows.double() * (len(self.windows) / self.count)
        return self.second_moment().sub_(means.mT @ means / len(means))

    def add_(self, other: "Moment") -> None:
        """Add what was observed on other samples, which come after these, in place."""
        if self.windows is not None:
            self.windows = torch.cat(self._windows_beside(other))
        if self.rows is not None:
            self.rows = torch.cat([self.rows, other.rows])
        for part in ("total", "absolute", "second"):
            if (sums := getattr(self, part)) is not None:
                sums += getattr(other, part)
        self.count += other.count

    def _windows_beside(self, other: "Moment") -> list[Tensor]:
        """Return the window sums of both, times the roots of the mean length of all over the means of their own."""
        mean = (self.count + other.count) / (len(self.windows) + len(other.windows))
        return [one.windows * (mean * len(one.windows) / one.count) ** 0.5 for one in (self, other)]

    def rounded(self) -> "Moment":
        """The moment as it is saved, in fp32: what is computed from saved moments is computed from these."""
        parts = (self.total, self.absolute, self.second, self.rows, self.windows)
        return Moment(float(self.count), *(None if part is None else part.float() for part in parts))


@dataclass
class CrossMoment:
    """Sums over ``count`` observations of an input ``x`` ``(F,)`` and a target ``t`` ``(D,)``."""

    count: float
    total: Tensor  # (D,) sum of t
    second: Tensor  # (D, F) sum of t x^T
    energy: Tensor  # () sum of ||t||^2
    rows: None = None

    @property
    def mean(self) -> Tensor:
        return self.total.double() / self.count

    def add_(self, other: "CrossMoment") -> None:
        """Add what was observed on other samples, in place."""
        self.total += other.total
        self.second += other.second
        self.energy += other.energy
        self.count += other.count


BlockMoments = dict[str, Any]  # statistic -> Moment, or CrossMoment of two streams; names: `statistics.STATISTICS`


@contextlib.contextmanager
def _bf16_products():
    """Let oneDNN multiply fp32 tensors that HOLD bf16 numbers with its bf16 instructions.

    Such products are exact in fp32 and sums stay in fp32, so nothing is lost, and it is 3 times faster on CPUs with
    AMX. PyTorch offers this only as a process-wide setting on CPUs (on CUDA `torch.mm(out_dtype=)` does the same),
    hence the scope.
    """
    backend: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  made at run time
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


@contextlib.contextmanager
def _exact_products(x: Tensor):
    """Hooks run inside the model's autocast, which would round their products to bf16."""
    with torch.autocast(x.device.type, enabled=False), _products(x, x.dtype is torch.bfloat16):
        yield


def _products(x: Tensor, exact_in_bf16: bool):
    """By bf16 instructions where that is exact and faster."""
    faster = exact_in_bf16 and x.device.type == "cpu" and multiplies_bf16_fast()
    return _bf16_products() if faster else contextlib.nullcontext()


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies half-precision numbers into fp32 results by itself, as tensor cores do."""
    if not dtype.is_floating_point or dtype.itemsize != 2:
        return False
    x = torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):  # PyTorch has no other way to ask
        return False
    return True


def gram(x: Tensor, sums: list[Tensor]) -> None:
    """Add the upper tiles of ``x^T x`` to ``sums``; products of half-precision numbers are exact.

    Args:
        x: ``(n, N)`` activations.
        sums: of :func:`upper_tiles`, fp32, on the device of ``x``.
    """
    with _exact_products(x):
        widens = _widens(x.device, x.dtype)
        x = x if widens else x.float()
        for i, tile in enumerate(sums):
            a = i * TILE
            left, right = x[:, a : a + len(tile)].T, x[:, a:]
            if widens:
                tile.add_(torch.mm(left, right, out_dtype=torch.float32))
            else:
                tile.addmm_(left, right)


def cross(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` ``(A, B)``, fp32, of ``a`` ``(n, A)`` and ``b`` ``(n, B)``; products of bf16 numbers are exact."""
    both = a.dtype is b.dtype is torch.bfloat16
    with torch.autocast(a.device.type, enabled=False), _products(a, both):
        return a.detach().float().T @ b.detach().float()


def upper_tiles(N: int, device: torch.device) -> list[Tensor]:
    """Zeros, fp32: of every ``TILE`` rows of an ``(N, N)`` matrix the columns from the first of these rows on."""
    return [torch.zeros(min(TILE, N - a), N - a, device=device) for a in range(0, N, TILE)]


def mirror(A: Tensor) -> None:
    """Copy the upper triangle of square ``A`` onto the lower one, in place: a copy of the largest moment is a peak."""
    for a in range(0, len(A), TILE):
        b = a + TILE
        A[b:, a:b] = A[a:b, b:].T
        diagonal = A[a:b, a:b]
        diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)


def accumulator(device: torch.device) -> torch.device:
    """Where fp64 sums live: beside the products, except on devices without fp64."""
    return torch.device("cpu") if device.type == "mps" else device


def wide(x: Tensor) -> Tensor:
    """The same numbers in fp64, on the CPU where the device has none."""
    return x.to(accumulator(x.device)).double()


def moved(moments: BlockMoments, device: torch.device) -> BlockMoments:
    """Moments beside the weights they go with: what was kept in a folder is on the CPU."""

    def there(moment):
        parts = {field.name: getattr(moment, field.name) for field in fields(moment)}
        return replace(moment, **{name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)})

    return {name: there(moment) for name, moment in moments.items()}


def sum_shards(
    shards: Iterable[BlockMoments], *, is_shared: bool, owner: int = 0, owners: Mapping[str, int] = NO_OWNERS
) -> BlockMoments:
    """Add the moments of the shards of a calibration set, in their order.

    Args:
        shards: of this process; each is measured when its turn comes.
        is_shared: whether other processes have further shards. All of them call this then.
        owner: the process that gets the sums; the others get nothing then.
        owners: statistic -> the process that gets its sums in place of ``owner``.

    Cost: the process that adds holds the moments of two shards at a time, any other one those of all its shards.
    """
    if is_shared and process_count() > 1:
        shards = _collected(list(shards), owner, owners)
    sums: BlockMoments = {}
    for moments in shards:
        for name, moment in moments.items():
            if name in sums:
                sums[name].add_(moment)
            else:
                sums[name] = moment
    return sums


def _collected(parcels: list[BlockMoments], owner: int, owners: Mapping[str, int]) -> Iterator[BlockMoments]:
    """Yield the moments of all shards that are this process's to add, those of one owner after those of another."""
    for process in sorted({owner, *owners.values()}):
        theirs = [{name: m for name, m in parcel.items() if owners.get(name, owner) == process} for parcel in parcels]
        yield from collect(theirs, process)


def _fp32_parts(x: Tensor, rows: int) -> list[Tensor]:
    """Split the rows of ``x`` so that no fp32 sum that holds ``rows`` already grows beyond :data:`FP32_ROWS`."""
    return [part for part in (x[: FP32_ROWS - rows], *x[FP32_ROWS - rows :].split(FP32_ROWS)) if len(part)]


class VectorMoment:
    """Accumulates :class:`Moment` of rows, whose first ones show how wide they are and where they lie."""

    def __init__(self, *, absolute: bool = False):
        self.count = 0
        self.total = self.second = torch.zeros(())
        self.absolute = torch.zeros(()) if absolute else None
        self._sums: list[Tensor] = []  # not yet in `second`
        self._rows = 0  # of how many rows these are

    def _begin(self, width: int, device: torch.device) -> None:
        self.total = torch.zeros(width, dtype=torch.float64, device=accumulator(device))
        self.second = self.total.new_zeros(width, width)
        if self.absolute is not None:
            self.absolute = torch.zeros_like(self.total)
        self._sums = upper_tiles(width, device)

    def add(self, x: Tensor) -> None:
        """Add ``x`` ``(..., N)``."""
        x = x.detach().flatten(0, -2)
        if not self._sums:
            self._begin(x.shape[1], x.device)
        self.count += len(x)
        self.total += x.sum(0, dtype=torch.float32).to(self.total.device)
        if self.absolute is not None:
            self.absolute += x.abs().sum(0, dtype=torch.float32).to(self.total.device)
        for part in _fp32_parts(x, self._rows):
            gram(part, self._sums)
            self._rows += len(part)
            if self._rows == FP32_ROWS:
                self._flush()

    def _flush(self) -> None:
        for i, tile in enumerate(self._sums):
            a = i * TILE
            self.second[a : a + len(tile), a:].add_(tile.to(self.second.device))
            tile.zero_()
        self._rows = 0

    def finish(self) -> Moment:
        self._flush()
        self._sums = []
        mirror(self.second)
        return Moment(self.count, self.total, self.absolute, self.second)


class CrossSums:
    """Accumulates a :class:`CrossMoment`."""

    def __init__(self):
        self.count = 0
        self.total = self.second = self.energy = torch.zeros(())
        self._sums, self._rows = None, 0  # not yet in `second`, and of how many rows

    def add(self, x: Tensor, t: Tensor) -> None:
        """Add ``x`` ``(..., F)`` with ``t`` ``(..., D)``, fp32."""
        x, t = x.flatten(0, -2).float(), t.flatten(0, -2)
        where = accumulator(x.device)
        self.count += len(x)
        self.total = self.total + t.sum(0).to(where).double()
        self.energy = self.energy + t.square().sum().to(where).double()
        for x_part, t_part in zip(_fp32_parts(x, self._rows), _fp32_parts(t, self._rows), strict=True):
            with torch.autocast(x.device.type, enabled=False):
                self._sums = t_part.T @ x_part if self._sums is None else self._sums.addmm_(t_part.T, x_part)
            self._rows += len(x_part)
            if self._rows == FP32_ROWS:
                self._flush()

    def _flush(self) -> None:
        if self._sums is not None:
            self.second = self.second + self._sums.to(accumulator(self._sums.device)).double()
        self._sums, self._rows = None, 0

    def finish(self) -> CrossMoment:
        self._flush()
        return CrossMoment(self.count, self.total, self.second, self.energy)


class Samples:
    """Keeps every ``stride``-th row, where rows are counted from ``first``."""

    def __init__(self, stride: int, first: int = 0):
        self.stride, self.seen, self.rows = stride, first, []

    def add(self, x: Tensor) -> None:
        """Look at ``x`` ``(..., N)``."""
        x = x.detach().flatten(0, -2)
        self.rows.append(x[-self.seen % self.stride :: self.stride].float().to(accumulator(x.device)))
        self.seen += len(x)

    def finish(self) -> Moment:
        rows = torch.cat(self.rows)
        return Moment(len(rows), rows=rows)


def heads_first(x: Tensor) -> Tensor:
    """``(B, H, T, N)`` fp32 copy of ``x`` ``(B, T, H, N)``: products and what is done in place run on whole rows."""
    x = x.detach().transpose(1, 2)
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def head_grams(x: Tensor, *, exact_in_bf16: bool = False) -> Tensor:
    """``(B, H, N, N)`` Gram of every sequence and head of ``x`` ``(B, H, T, N)``, fp32.

    Args:
        exact_in_bf16: every entry of the fp32 ``x`` is a bf16 number.
    """
    with torch.autocast(x.device.type, enabled=False), _products(x, exact_in_bf16):
        return x.transpose(-1, -2) @ x


class HeadMoment:
    """Accumulates one :class:`Moment` per head."""

    def __init__(self):
        self.count = 0
        self.total = self.second = torch.zeros(())

    def add(self, x: Tensor, grams: Tensor) -> None:
        """Add ``x`` ``(B, H, T, N)``, fp32, with its ``grams`` ``(B, H, N, N)``."""
        self.count += x.shape[0] * x.shape[2]
        where = accumulator(x.device)
        self.total = self.total + x.sum(2).to(where).double().sum(0)
        self.second = self.second + grams.to(where).double().sum(0)

    def finish(self) -> Moment:
        return Moment(self.count, self.total, second=self.second)


def check_finite(moments: BlockMoments, block: str, what: str = "activations") -> None:
    """Raise :class:`NumericsError` naming the block and the statistic that is not finite."""
    for name, moment in moments.items():
        for tensor in (moment.total, moment.second, moment.rows):
            if tensor is not None and not all_finite(tensor):
                raise NumericsError(
                    f"{what} of {block} ({name}) are NaN or infinite; try {option('dtype', 'float32')}, "
                    "or check the checkpoint"
                )
