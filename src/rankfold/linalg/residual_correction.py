"""Fit an output projection to what is missing after it, as far as that holds on windows it was not fitted to.

Shape legend: D model width, F width of the projection's input.

A refit to the outputs of the dense layer leaves what earlier layers lost where it is. A refit to everything the stream
lacks repairs some of that too, and over-fits: the residue is large, mostly noise to this layer, and differs between
texts. Held-out windows tell how much of it is noise; they are of the same text, so what they confirm still holds less
on another one. Hence the smallest step that keeps most of what the best one gains on them: its last fifth is dearly
bought (docs/method.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .psd import choosing, damping, energy, spd_factor

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
KEEP = 0.8  # of what the best step gains on held-out samples
SKETCH = 128  # random combinations of the outputs by which ridges of wide moments are compared


class Regression(NamedTuple):
    """Moments of a regression of targets ``t`` on inputs ``h`` over some windows, all on any one positive scale."""

    C: Tensor  # (F, F) E[h h^T]
    cross: Tensor  # (D, F) E[t h^T]
    energy: Tensor  # () E||t||^2

    def loss(self, W: Tensor) -> Tensor:
        """``E||t - W h||^2``."""
        return self.energy - 2 * (W * self.cross).sum() + energy(W, self.C)

    def relative_loss(self, W: Tensor) -> float:
        """The loss over ``E||t||^2``; the loss itself where the targets are zero."""
        return self.loss(W).item() / (self.energy.item() or 1.0)


class Correction(NamedTuple):
    """Result of :func:`correct`."""

    W: Tensor  # (D, F)
    strength: float  # in [0, 1]; 0 leaves the weight as it is
    ridge: float
    before: float  # relative error E||t - W h||^2 / E||t||^2 on the held-out samples
    after: float


@torch.no_grad()
def correct(W: Tensor, fit: Regression, held_out: Regression, ridges: tuple[float, ...] = RIDGES) -> Correction:
    r"""Move a weight towards the regression of what is missing, by as much as held-out samples confirm.

    With the residue :math:`r = t - W h` of the fit and :math:`\lambda` the ridge times the mean diagonal of ``C``, the
    step is :math:`\Delta = \mathbb{E}[r h^\top] (C + \lambda I)^{-1}`: ridge regression that shrinks towards the weight
    there is. On the held-out samples :math:`\mathbb{E}\|t - (W + \alpha \Delta) h\|^2` is a parabola in :math:`\alpha`,
    so its best :math:`\alpha \in [0, 1]` is known for every ridge. Of all pairs that gain four fifths of what the best
    one gains there, the one that changes the weight least is taken.

    Args:
        W: ``(D, F)``.
        fit: moments of the windows to fit.  held_out: of the others; same dtype as ``W``.
        ridges: candidates, relative to the mean diagonal of ``C``.

    Returns:
        :class:`Correction`; never worse than ``W`` on the held-out samples.

    Cost: a Cholesky factorisation of ``(F, F)``, two solves and three products of ``(D, F, F)``. For every ridge
    another factorisation, with solves and a product for ``min(D, SKETCH)`` outputs: of wide moments in fp32, on random
    combinations of the outputs, whose expected gain and size are those of all outputs. Memory: beside the moments one
    ``(F, F)``.
    """
    residue, slope = (moment.cross.addmm(W, moment.C, alpha=-1) for moment in (fit, held_out))  # (D, F) E[r h^T]
    before, scale = held_out.energy - (W * (held_out.cross + slope)).sum(), held_out.energy.item() or 1.0
    unchanged = Correction(W, 0.0, ridges[-1], before.item() / scale, before.item() / scale)
    few = _few_outputs(residue, slope, choosing(fit.C))
    tried = [step for ridge in ridges if (step := _step(*few, fit, held_out, ridge)) is not None]
    wanted = KEEP * max((step.best_gain for step in tried), default=0.0)
    if not wanted > 0:
        return unchanged
    step = min((step for step in tried if step.best_gain >= wanted), key=lambda step: step.size(wanted))
    if len(step.change) < len(W):
        share, step = wanted / step.best_gain, _step(residue, slope, fit, held_out, step.ridge)
        if step is None or not step.best_gain > 0:
            return unchanged
        wanted = share * step.best_gain
    strength = step.strength(wanted)
    after = before.item() - 2 * strength * step.gain + strength**2 * step.curvature
    return Correction(W + strength * step.change, strength, step.ridge, before.item() / scale, after / scale)


def _few_outputs(residue: Tensor, slope: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both ``(D, F)``, or where choices are made in another ``dtype`` ``SKETCH`` combinations of their rows with random
    signs.

    Sums over outputs of products of two rows keep their expectation, and all ridges have the same signs.
    """
    if dtype is residue.dtype or len(residue) <= SKETCH:
        return residue, slope
    bits = torch.randint(2, (SKETCH, len(residue)), generator=torch.Generator().manual_seed(0), device="cpu")
    signs = (2 * bits - 1).to(residue) / SKETCH**0.5
    return (signs @ residue).to(dtype), (signs @ slope).to(dtype)


class _Step(NamedTuple):
    """Regression of the residue at one ridge, and what it does on the held-out samples."""

    ridge: float
    change: Tensor  # (D, F)
    gain: float  # half the slope of what strength gains, at strength 0
    curvature: float  # what the square of strength loses

    @property
    def best_gain(self) -> float:
        strength = min(max(self.gain / self.curvature, 0.0), 1.0) if self.curvature > 0 else 0.0
        return 2 * strength * self.gain - strength**2 * self.curvature

    def strength(self, wanted: float) -> float:
        """The least one that gains so much."""
        root = max(self.gain**2 - self.curvature * wanted, 0.0) ** 0.5
        return min((self.gain - root) / self.curvature, 1.0)

    def size(self, wanted: float) -> float:
        return self.strength(wanted) * self.change.norm().item()


def _step(residue: Tensor, slope: Tensor, fit: Regression, held_out: Regression, ridge: float) -> _Step | None:
    """``None`` where rounding of the sums is larger than this ridge."""
    shift = damping(fit.C, ridge)
    factor = spd_factor(fit.C, shift=shift, dtype=residue.dtype)
    if factor is None and residue.dtype is not fit.C.dtype:
        return _step(residue.to(fit.C), slope.to(fit.C), fit, held_out, ridge)
    if factor is None:
        return None
    change = factor.solve(residue.T).T
    del factor  # memory peaks here
    parts = torch.stack([(change * slope).sum(dtype=torch.float64), energy(change, held_out.C)])
    return _Step(ridge, change, *parts.tolist())
