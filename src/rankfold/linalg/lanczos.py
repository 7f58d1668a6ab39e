"""The largest eigenvalue of a positive semi-definite matrix that is only multiplied.

Shape legend: N rows of the matrix, n steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FEWEST, MOST = 16, 200  # steps; real moments take 16 to 60
SLACK = 5e-3  # what is added, relative to the value found: at least the distance from it to the true one


@torch.no_grad()
def largest_eigenvalue(multiply: Callable[[Tensor], Tensor], like: Tensor) -> float:
    r"""Return a number that is not below :math:`\lambda_{max}(A)`, and less than 1 % above it.

    Lanczos iteration with full reorthogonalisation from a random vector. It ends when the residual of the largest Ritz
    value is under half of ``SLACK``; both are added, so that a bound made of the result still holds. A matrix that
    needs more than ``MOST`` steps gets the residual it ends with on top.

    Args:
        multiply: ``x -> A x`` for ``x`` ``(N,)``; ``A`` symmetric, positive semi-definite.
        like: any ``(N, ...)`` tensor of the dtype and device of ``A``.

    Cost: O(n N^2) with a dense ``A``, n vectors of memory. Deterministic.
    """
    N = len(like)
    vector = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=like.dtype, device="cpu").to(like.device)
    basis = (vector / vector.norm())[None]  # (n, N)
    T = torch.zeros(MOST, MOST, dtype=torch.float64, device="cpu")
    for n in range(1, min(N, MOST) + 1):
        new = multiply(basis[-1])
        T[n - 1, n - 1] = torch.dot(basis[-1], new).item()
        for _ in range(2):  # once leaves what rounding left
            new = new - basis.T @ (basis @ new)
        values, vectors = torch.linalg.eigh(T[:n, :n])
        value, length = values[-1].clamp_min(0).item(), new.norm().item()
        residual = length * vectors[-1, -1].abs().item()
        is_invariant = length <= N * torch.finfo(like.dtype).eps * value
        if is_invariant or (n >= FEWEST and residual <= SLACK / 2 * value) or n == min(N, MOST):
            break
        T[n, n - 1] = T[n - 1, n] = length
        basis = torch.cat([basis, (new / length)[None]])
    return value * (1 + SLACK) + (0.0 if is_invariant else residual)
