"""What sums of fp32 cost in a moment on the device, against exact ones, with massive activations among the others."""

import torch
from torch import Tensor

from moment_precision import errors
from rankfold.calibration import moments
from rankfold.methods import make_method

from .bench import Bench

DEFINITIONS = {
    "errors": "rows summed in fp32 -> spectral norm of (moment - fp64 moment), over the ridge that a compression adds",
    "cross_error": "Frobenius norm of (cross moment - fp64 cross moment), over that of the latter",
    "largest": "largest absolute activation",
    "tf32": "whether products of fp32 were allowed to be TF32 when this was measured",
}
MASSIVE = 1500.0  # of one unit on one token in a hundred; others are about one
ROWS = (8192, 26624)  # of a batch


def run(bench: Bench) -> None:
    width = 48 if bench.is_tiny else 4096
    for rows in (64, 128) if bench.is_tiny else ROWS:
        name = f"{rows} rows x {width}"
        if bench.wants(name):
            with bench.trying(name):
                bench.add(name, **_moment(bench, rows, width), **_cross(bench, rows, width))


def activations(bench: Bench, rows: int, width: int) -> Tensor:
    """Return ``(rows, width)`` bf16: a falling spectrum, some units much larger than others, and a massive one."""
    generator = torch.Generator(bench.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=bench.device)

    rank = max(1, width // 4)
    x = normal(rows, rank) @ (normal(rank, width) * rank**-0.5) + 0.1 * normal(rows, width)
    x *= normal(width).exp()
    x[::100, 0] = MASSIVE
    return x.bfloat16()


def _moment(bench: Bench, rows: int, width: int) -> dict:
    x, shipped = activations(bench, rows, width), moments.FP32_ROWS
    settings = {"shipped": shipped, "a batch": rows, **({} if bench.is_tiny else {"1024": 1024})}
    try:
        found = errors([x], make_method("modegpt", sparsity=0.3).ridge, settings)
    finally:
        moments.FP32_ROWS = shipped
    return found | {"fp32_rows": settings, "tf32": torch.backends.cuda.matmul.allow_tf32}


def _cross(bench: Bench, rows: int, width: int) -> dict:
    x, sums = activations(bench, rows, width), moments.CrossSums()
    t = torch.randn(rows, width // 2, generator=torch.Generator(bench.device).manual_seed(1), device=bench.device)
    sums.add(x, t)
    exact = t.double().T @ x.double()
    return {"cross_error": ((sums.finish().second - exact).norm() / exact.norm()).item()}
