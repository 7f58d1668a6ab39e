"""Type I: keep some hidden units of an MLP, refit the down projection on top of them.

Shape legend: D model width, F hidden (intermediate) width, R kept width.
Weights use the ``torch.nn.Linear`` layout ``(out, in)``. The MoDeGPT paper (arXiv:2408.09632) writes the transpose: its
``W_U S_k`` is ``W_up[keep]`` here and its ``W_D`` is ``W_down.T``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .elimination import eliminate_units, elimination, others
from .lanczos import largest_eigenvalue
from .psd import ROWS, check_moment, choosing, energy, relative, spd_factor, spd_inverse

SELECTIONS = ("obs", "leverage")
# A leverage score that is further below zero than rounding explains: the moment is indefinite.
BELOW_ZERO = {torch.float64: 1e-6, torch.float32: 1e-3}


class NystromBounds(NamedTuple):
    """Guarantees for a choice of units; both bound :attr:`Nystrom.error`."""

    # Theorem 1, Eq. 7, on C + lam I; less than 2 % above, for its two spectral norms are estimated from above.
    theorem: float
    proposition: float | None  # Proposition 1, corrected; None where its premise (epsilon < 1) does not hold
    epsilon: float  # sum of the leverage scores of the dropped units


class Nystrom(NamedTuple):
    """Result of :func:`nystrom`."""

    keep: Tensor  # (R,) hidden units that survive, ascending
    W_down: Tensor  # (D, R) refitted down projection, dtype of the input weight
    error: float  # mean squared output error per token, E||W_down a - W_down' a_k||^2
    relative_error: float  # RMS output error over RMS output, on the statistics in C
    bounds: NystromBounds | None  # None where the units were chosen by the caller
    clamped: bool  # C was indefinite beyond the ridge and its negative eigenvalues were set to zero


class _Damped(NamedTuple):
    """A moment made positive definite."""

    C: Tensor  # (F, F) undamped; clamped where that was needed
    lam: float
    inverse: Tensor  # (F, F) of C + lam I
    clamped: bool


def _damp(C: Tensor, ridge: float, *dtypes: torch.dtype) -> _Damped:
    """``(C + lam I)^-1`` with ``lam = ridge * mean(diag C)``.

    Sums of fp32 products with a few massive activations are indefinite by more than a small ridge. There, and only
    there, negative eigenvalues are clamped first (one ``eigh``); otherwise Cholesky is ten times cheaper.

    Args:
        dtypes: of the inverse; the first in which rounding is below the ridge, and last that of ``C``.
    """
    lam = ridge * C.diagonal().mean().item()
    if not lam > 0:
        raise ValueError(f"ridge * mean(diag(C)) must be positive, got {lam:.1e}; the units never fire, or ridge is 0")
    for dtype in dict.fromkeys((*dtypes, C.dtype)):
        inverse = spd_inverse(C, shift=lam, dtype=dtype)
        if inverse is not None and not (lam * inverse.diagonal() > 1 + BELOW_ZERO[dtype]).any():
            return _Damped(C, lam, inverse, False)
        del inverse
    eigenvalues, U = torch.linalg.eigh(C)
    C = (U * eigenvalues.clamp_min(0)) @ U.T
    inverse = spd_inverse(C, shift=lam)
    if inverse is None:
        raise torch.linalg.LinAlgError(_not_definite("C + lam I", C))
    return _Damped(C, lam, inverse, True)


def _not_definite(what: str, A: Tensor) -> str:
    return f"{what} {tuple(A.shape)} is not positive definite; raise the ridge or use more calibration tokens"


@torch.no_grad()
def nystrom(
    W_down: Tensor,
    C: Tensor,
    *,
    rank: int,
    ridge: float = 1e-4,
    selection: str = "obs",
    output_root: Tensor | None = None,
    keep: Tensor | None = None,
) -> Nystrom:
    r"""Choose ``rank`` hidden units and the best down projection on top of them.

    For hidden activations ``a`` with second moment ``C = E[a a^T]`` and the index set ``k`` of the chosen units,
    returns the minimiser

    .. math:: W' = \arg\min_{W'} \mathbb{E}\,\|W_\text{down} a - W' a_k\|^2
                 = W_k + W_d\, C_{dk}\, (C_{kk} + \lambda I)^{-1},

    ``d`` the dropped units. The paper's :math:`W_\text{down} C_{:,k} C_{kk}^{+}` is the same for ``lambda = 0``;
    damped, it would also shrink the kept weights towards zero, for nothing.

    MoDeGPT Algorithm 1 and Theorem 1. The caller slices ``W_up[keep]`` and, for a gated MLP, ``W_gate[keep]``. Where
    the down projection has a bias, pass the covariance and move the mean into the bias (LatentLLM App. B.2).

    Args:
        W_down: ``(D, F)`` weight of the down projection.
        C: ``(F, F)`` second moment of the INPUT OF THE DOWN PROJECTION (after activation and gate); any positive scale.
        rank: hidden units to keep, ``1 <= rank <= F``.
        ridge: ``lam = ridge * mean(diag(C))``, used for the choice and for the solve.
        selection: ``obs``: one after another the unit whose loss costs least after refitting
            (:func:`rankfold.linalg.elimination.eliminate_units`). ``leverage``: the largest ridge leverage scores, the
            paper's Algorithm 1; it does not see ``W_down``, and drops collinear units all together.
        output_root: ``(D, D)`` root ``R`` of an output metric: units go by what they add to
            :math:`\|R (W a - W' a_k)\|^2`. The best weights on the units that stay are the same in every metric. All
            outputs count alike by default.
        keep: ``(rank,)`` units to keep, ascending, from :func:`error_curve` on the same moment, to compare what they
            do. Neither the inverse nor the choice is computed again then, and no bounds; wide moments are solved in
            fp32.

    Returns:
        :class:`Nystrom`. With ``rank == F`` the units all stay and ``W_down`` comes back unchanged; where no unit ever
        fires the first ones stay and the error is exactly 0.

    Raises:
        ValueError: shapes disagree, ``rank`` or ``ridge`` is out of range, ``C`` is not finite, unknown ``selection``.
        torch.linalg.LinAlgError: a kept block is numerically singular even after damping.

    Cost: O(F^3 + D F^2) time, beside ``C`` one (F, F) matrix and a few (D, F) of memory. Deterministic.
    """
    F = W_down.shape[1]
    check_moment(C, F)
    if not 1 <= rank <= F:
        raise ValueError(f"rank must be in [1, {F}], got {rank}")
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {selection!r}")
    if not ridge > 0:
        raise ValueError(f"ridge must be > 0, got {ridge}")
    if rank == F or not C.diagonal().any():  # all stay, or none ever fires and any of them will do
        first = torch.arange(rank, device=C.device)
        return Nystrom(first, W_down[:, :rank].clone(), 0.0, 0.0, NystromBounds(0.0, 0.0, 0.0), False)
    W = W_down.to(C)  # decompose in the precision of the statistics, never in bf16
    if keep is not None:
        return _fit(W_down, W.to(choosing(C)), C, keep, ridge * C.diagonal().mean().item())[0]
    damped = _damp(C, ridge)
    # Ridge leverage scores [C (C + lam I)^-1]_ii, in [0, 1): MoDeGPT Algorithm 1, line 2. The paper has lam = 1 (App.
    # B.2) on un-normalised sums; here lam is relative, so the scores do not depend on the scale of C.
    scores = 1.0 - damped.lam * damped.inverse.diagonal()
    inverse_norm = largest_eigenvalue(damped.inverse.mv, damped.inverse)
    if selection == "leverage":
        keep = scores.topk(rank).indices.sort().values
    else:
        # Eliminating acts on the columns of W alone, so that of R W is that of W in the metric.
        keep = eliminate_units(W if output_root is None else output_root.to(W) @ W, damped.inverse, rank=rank)
    C, lam, clamped = damped.C, damped.lam, damped.clamped
    del damped  # memory peaks here: no inverse beside the fit
    fit, complement = _fit(W_down, W, C, keep, lam, bounded=True)
    dropped = others(keep, F)
    bounds = _bounds(W, W[:, dropped], complement, inverse_norm, scores[dropped].sum().item(), lam)
    return fit._replace(bounds=bounds, clamped=clamped)


def _fit(
    W_down: Tensor, W: Tensor, C: Tensor, keep: Tensor, lam: float, *, bounded: bool = False
) -> tuple[Nystrom, float]:
    """The best weights on the kept units and their error, without bounds; and what :class:`_Refit` has for these."""
    dropped = others(keep, len(C))
    refit = _refit(W, C, keep, dropped, lam, bounded=bounded)
    # Everything is optimal, hence orthogonal, under C + lam I; what the damping adds is taken off again. It acts on
    # what stands in for dropped units only: kept weights are not shrunk.
    lost = energy(W[:, dropped], C[dropped][:, dropped])
    error = lost - refit.told.square().sum() - lam * refit.added.square().sum()
    error, total = error.clamp_min(0).item(), energy(W.to(choosing(C)), C).item()
    weights = (W[:, keep] + refit.added).to(W_down.dtype)
    return Nystrom(keep, weights, error, relative(error, total), None, False), refit.complement


class ErrorCurve(NamedTuple):
    """Result of :func:`error_curve`."""

    errors: Tensor  # (F - least + 1,) relative squared output error when 0, 1, 2, ... units have been eliminated
    removed: Tensor | None  # (F - least,) units in the order they go; None where C was clamped or no unit fires


@torch.no_grad()
def error_curve(W_down: Tensor, C: Tensor, *, least: int, ridge: float = 1e-4, selection: str = "obs") -> ErrorCurve:
    """Compute the error at every rank from ``least`` on, from one elimination on the damped moment; of wide moments in
    fp32 (:func:`rankfold.linalg.psd.choosing`).

    Arguments as for :func:`nystrom`.

    Raises:
        ValueError: as :func:`nystrom`.
    """
    F = W_down.shape[1]
    check_moment(C, F)
    if not C.diagonal().any():
        return ErrorCurve(torch.zeros(F - least + 1, dtype=torch.float64), None)
    W = W_down.to(C)
    total = energy(W.to(choosing(C)), C).clamp_min(torch.finfo(C.dtype).tiny).item()
    damped = _damp(C, ridge, C.dtype if selection == "leverage" else choosing(C))  # all leave at once, so no fp32
    W, P = W.to(damped.inverse.dtype), damped.inverse
    if selection == "leverage":  # the scores fall as the diagonal of the inverse rises
        order = P.diagonal().argsort(descending=True)[: F - least]
        factor = torch.linalg.cholesky(P[order[:, None], order])
        losses = torch.linalg.solve_triangular(factor, W[:, order].T, upper=False).square().sum(1).double().cpu()
    else:
        order, losses = elimination(W, P, rank=least)
    errors = torch.cat([torch.zeros(1, dtype=torch.float64), losses.cumsum(0)]) / total
    return ErrorCurve(errors, None if damped.clamped else order)


class _Refit(NamedTuple):
    """The kept units in place of all; ``L`` is the Cholesky factor of their damped moment."""

    added: Tensor  # (D, R) to the weights of the kept units
    told: Tensor  # (R, D) L^-1 C_kd W_d^T: what the kept units tell of the output of the dropped ones
    complement: (
        float  # squared Frobenius norm of the complement of the kept units in C + lam I; NaN where not asked for
    )


def _refit(W: Tensor, C: Tensor, keep: Tensor, dropped: Tensor, lam: float, *, bounded: bool = False) -> _Refit:
    """Solve for the weights on the kept units afresh, whatever chose them; in the dtype of ``W`` where rounding allows
    that.

    Cost: R^3 / 3 + 2 D R F flops; ``bounded``, also those of the complement: F R (F - R).
    """
    kept = C[keep[:, None], keep]
    factor = spd_factor(kept, shift=lam, dtype=W.dtype)
    if factor is None and W.dtype is not C.dtype:
        return _refit(W.to(C), C, keep, dropped, lam, bounded=bounded)
    if factor is None:
        raise torch.linalg.LinAlgError(_not_definite("the block of the kept units", kept))
    del kept
    cross, W_dropped, complement = C[keep[:, None], dropped].to(W.dtype), W[:, dropped], float("nan")
    if bounded:
        half = factor.forward(cross)  # L^-1 C_kd
        del cross
        complement, told = _complement(C, dropped, half, lam), half @ W_dropped.T
    else:
        told = factor.forward(cross @ W_dropped.T)
    return _Refit(factor.backward(told).T, told, complement)


def _complement(C: Tensor, dropped: Tensor, half: Tensor, lam: float) -> float:
    """``||C_dd + lam I - half^T half||_F^2``, by panels of the upper triangle."""
    rest, found = dropped.nonzero()[:, 0], torch.zeros((), dtype=C.dtype, device=C.device)
    for a in range(0, len(rest), ROWS):
        b = min(a + ROWS, len(rest))
        panel = C[rest[a:b, None], rest[a:]].addmm_(half[:, a:b].T, half[:, a:], alpha=-1)
        panel.diagonal().add_(lam)
        panel.square_()
        found += 2 * panel.sum() - panel[:, : b - a].sum()
    return found.item()


def _bounds(
    W: Tensor, W_dropped: Tensor, complement: float, inverse_norm: float, epsilon: float, lam: float
) -> NystromBounds:
    r"""Guarantees on :math:`V = \mathbb{E}\|W a - W' a_k\|^2`, both evaluated on ``C + lam I``, where ``W'`` is
    optimal.

    Theorem 1 (Eq. 7): :math:`V \le \|W_D\|_2^2\, \|C^{-1}\|_2\, \|C - C_{:,k} C_{kk}^{-1} C_{k,:}\|_F^2`.

    Proposition 1 as printed, :math:`\|W_D\|_2^2 \|C^{-1}\|_2 \frac{\varepsilon^2 F^2}{R^2 (1-\varepsilon)^2}
    \sum_{i>R} \sigma_i^2(C)`, holds only for the ridge of McCurdy (2018), the tail of the spectrum over ``R``; with a
    ridge of one's own it is no bound. The same proof with that ridge left in gives :math:`V \le \lambda
    \frac{\varepsilon}{1-\varepsilon} \|W_d\|_2^2`, which is reported. It needs :math:`\varepsilon = \sum_{i \notin k}
    s_i < 1`; real MLPs drop hundreds of units with scores near one, so there it says nothing and is ``None``.
    """
    theorem = _squared_norm(W) * inverse_norm * complement
    proposition = lam * epsilon / (1 - epsilon) * _squared_norm(W_dropped) if epsilon < 1 else None
    return NystromBounds(theorem, proposition, epsilon)


def _squared_norm(W: Tensor) -> float:
    """Return the squared spectral norm of ``W``, as :func:`largest_eigenvalue` does: less than 1 % too large."""
    return largest_eigenvalue(lambda x: W @ (W.T @ x), W)
