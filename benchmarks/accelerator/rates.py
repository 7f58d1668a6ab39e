"""What the device does in a second: products, moments, decompositions, copies; and its entry of the table of cards."""

import statistics
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rankfold.calibration.moments import cross, gram, upper_tiles
from rankfold.compression.cards import OPERATIONS, PASS_BYTES, known_cards
from rankfold.compression.passes import forward
from rankfold.compression.rates import _RUN
from rankfold.linalg.elimination import _one_by_one
from rankfold.linalg.psd import spd_inverse

from .bench import Bench, memory_of
from .models import random_block

DEFINITIONS = {
    "seconds": "median of calls, each until the device has done all of it, after one that does not count; of calls "
    "that take longer than 2 s the first",
    "rate": "operations, or bytes read and written, over seconds; in 1e12 (TFLOP/s) or 1e9 (GB/s) of them a second",
    "routine": "what plans count (rankfold.methods.work), on matrices of that width, as the methods call it",
    "predicted_seconds": "of that routine by the table of cards, compression/cards.json",
    "entry": "what would stand in that table for this card",
}
SMALL, BATCH = 128, 32  # width of a head, heads of a block


def run(bench: Bench) -> None:
    for name, unit, amount, make in _cases(bench):
        if bench.wants(name):
            with bench.trying(name):
                call = make()
                seconds = bench.seconds(call)
                bench.add(name, seconds=seconds, rate=amount / seconds if amount else None, unit=unit)
                del call
    _routines(bench)
    _threads(bench)
    if bench.wants("entry"):
        with bench.trying("entry"):
            bench.add("entry", entry=_entry(bench))


Case = tuple[str, str | None, float | None, Callable[[], Callable[[], object]]]


def _cases(bench: Bench) -> Iterator[Case]:
    """Yield name, unit, amount of it, and what makes the call that is timed."""
    device, tiny = bench.device, bench.is_tiny
    big, rows, hidden, width = (128, 64, 96, 32) if tiny else (8192, 8192, 11008, 4096)

    def product(dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(big, big, device=device).to(dtype) for _ in range(2))
        return lambda: a @ b

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        yield f"product {str(dtype)[6:]} {big}", "TFLOP/s", 2 * big**3 / 1e12, lambda dtype=dtype: product(dtype)

    def moment() -> Callable[[], object]:
        x, sums = torch.randn(rows, hidden, device=device).bfloat16(), upper_tiles(hidden, device)
        return lambda: gram(x, sums)

    yield f"gram bf16 {rows} x {hidden}", "TFLOP/s", rows * hidden**2 / 1e12, moment

    def cross_moment() -> Callable[[], object]:
        t, x = torch.randn(rows, width, device=device), torch.randn(rows, hidden, device=device)
        return lambda: cross(t, x)

    yield f"cross fp32 {rows} x {width} x {hidden}", "TFLOP/s", 2 * rows * width * hidden / 1e12, cross_moment

    tokens = 64 if tiny else 2048
    view, make_forward = random_block(bench, "tiny" if tiny else "7b", batch=1 if tiny else 4, length=tokens)
    operations = forward(view, tokens)["bf16"] * tokens * (1 if tiny else 4)
    yield "forward of a block, bf16", "TFLOP/s", operations / 1e12, make_forward

    megabytes = 1 if tiny else 1024

    def copied(where: str, pinned: bool) -> Callable[[], object]:
        x = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=where, pin_memory=pinned)
        return lambda: x.to(device, copy=True)

    twice = 2 if device.type == "cpu" else 1
    yield "copy on the device", "GB/s", 2 * megabytes * 2**20 / 1e9, lambda: copied(str(device), False)
    yield "host to device, pageable", "GB/s", twice * megabytes * 2**20 / 1e9, lambda: copied("cpu", False)
    if device.type != "cpu":
        yield "host to device, pinned", "GB/s", megabytes * 2**20 / 1e9, lambda: copied("cpu", True)

    def read() -> Callable[[], object]:
        path = bench.folder / "read.safetensors"
        save_file({"x": torch.empty(megabytes * 2**20, dtype=torch.uint8)}, path)
        return lambda: load_file(path, device=str(device))

    yield "safetensors to device, from the page cache", "GB/s", megabytes * 2**20 / 1e9, read
    yield from _solvers(bench)


def _solvers(bench: Bench) -> Iterator[Case]:
    tiny, device = bench.is_tiny, bench.device

    def with_matrix(n: int, dtype: torch.dtype, run: Callable[[Tensor], object], batch: tuple[int, ...] = ()):
        def make() -> Callable[[], object]:
            C = _positive(n, device, dtype, batch)
            return lambda: run(C)

        return make

    for n in (16, 32) if tiny else (1024, 4096, 8192):
        for dtype in (torch.float64, torch.float32):
            yield f"eigh {str(dtype)[6:]} {n}", "TFLOP/s", 9 * n**3 / 1e12, with_matrix(n, dtype, torch.linalg.eigh)
    small, heads = (8, 4) if tiny else (SMALL, BATCH)
    for name, routine in {"eigh": torch.linalg.eigh, "svd": torch.linalg.svd}.items():
        yield f"{name} float64 {heads} x {small}", None, None, with_matrix(small, torch.float64, routine, (heads,))
    n = 48 if tiny else 11008
    f64 = torch.float64
    yield f"cholesky float64 {n}", "TFLOP/s", n**3 / 3 / 1e12, with_matrix(n, f64, torch.linalg.cholesky_ex)
    yield f"inverse float64 {n}", "TFLOP/s", n**3 / 1e12, with_matrix(n, f64, spd_inverse)

    def triangular(C: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(C, C[:, : n // 3], upper=False)

    yield (
        f"solve_triangular float64 {n} x {n // 3}",
        "TFLOP/s",
        n * n * (n // 3) / 1e12,
        with_matrix(n, f64, triangular),
    )


def _positive(n: int, device: torch.device, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
    """Return ``(*batch, n, n)`` positive definite matrices that are not diagonal."""
    C = torch.full((*batch, n, n), 0.5 / n, dtype=dtype, device=device)
    return C + torch.diag(torch.linspace(1, 2, n, dtype=dtype, device=device))


def _routines(bench: Bench) -> None:
    """Time what a plan counts, beside what the table of cards says."""
    cards = known_cards().values()
    card = min(cards, key=lambda card: abs(card.bytes - memory_of(bench.device)))
    for routine, call in _RUN.items():
        for n in (32,) if bench.is_tiny else (1536, 4096):
            name = f"routine {routine} {n}"
            if bench.wants(name):
                with bench.trying(name):
                    C = _positive(n, bench.device, torch.float64)
                    seconds = bench.seconds(lambda C=C, call=call: call(C), repeats=1)
                    bench.add(
                        name, seconds=seconds, predicted_seconds=card.seconds_for({(routine, n): 1}), of=card.name
                    )


def _threads(bench: Bench) -> None:
    """Time the serial part of an elimination, which runs on the CPU, on one thread and on all."""
    every = torch.get_num_threads()
    for n in (8,) if bench.is_tiny else (114, 298):
        for threads in dict.fromkeys((1, every)):
            name = f"removals one by one {n}, {threads} threads"
            if not bench.wants(name):
                continue
            torch.set_num_threads(threads)
            try:
                W, P = torch.randn(n, n, dtype=torch.float64), _positive(n, torch.device("cpu"), torch.float64)
                limit = torch.tensor(float("inf"), dtype=torch.float64)
                seconds = bench.seconds(lambda W=W, P=P, limit=limit, n=n: _one_by_one(W, P, limit, n - 1))
                bench.add(name, seconds=seconds, rate=(n - 1) / seconds, unit="removals/s")
            finally:
                torch.set_num_threads(every)


def _entry(bench: Bench) -> dict:
    """Return the rates of this card in the form of the plan's table."""
    rows = {row["name"].removeprefix("rates "): row for row in bench.record.value["rows"] if row.get("job") == "rates"}

    def rate(start: str) -> float:
        return statistics.median(
            row["rate"] for name, row in rows.items() if name.startswith(start) and row.get("rate")
        )

    def routine(name: str) -> float:
        found = max((key for key in rows if key.startswith(f"routine {name} ")), key=lambda key: int(key.split()[-1]))
        n, seconds = int(found.split()[-1]), rows[found]["seconds"]
        return {"pass": PASS_BYTES * n * n, "calls": n}.get(name, OPERATIONS.get(name, ("", 0.0))[1] * n**3) / seconds

    return {
        "gigabytes": round(memory_of(bench.device) / 1e9),
        "is_measured": True,
        "tflops": {
            "bf16": rate("forward"),
            "gram": rate("gram"),
            "fp32": rate("cross"),
            "fp64": statistics.median(map(routine, ("product", "cholesky", "inverse", "solve"))) / 1e12,
            "eigh": routine("eigh") / 1e12,
        },
        "memory": routine("pass") / 1e9,
        "read": rate("safetensors"),
        "solver_ms": 1e3
        * next(row["seconds"] for name, row in rows.items() if name.startswith("eigh") and " x " in name),
        "launch_us": 1e6 / routine("calls"),
    }
