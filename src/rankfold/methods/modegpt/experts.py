"""Type I in every expert of a block: slice up and gate, refit down, on the tokens that the expert sees.

Shape legend: E experts, D model width, F hidden width of an expert, R kept width, m tokens of an expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..._utils.processes import Each
from ...architectures import BlockView, Dense
from ...calibration.experts import ExpertMoment, RoutedTokens, energies
from ...calibration.moments import BlockMoments
from ...linalg.nystrom import error_curve, nystrom
from ...linalg.psd import energy, relative
from ..base import BlockResult, PrunableModule
from ..result import put_experts
from .mlp import metric_of, refitted, relative_ridge


class Expert(NamedTuple):
    """One expert, reduced."""

    keep: Tensor  # (R,)
    down: Dense  # (D, R)
    centre: Tensor | None  # (F,) what its bias took
    seen: ExpertMoment  # without the moment
    error: float  # squared, per unit of squared weight
    total: float  # of its dense output


def reduce_experts(
    method, view: BlockView, moments: BlockMoments, rank: int, result: BlockResult, each: Each = map
) -> None:
    """Algorithm 1 in each expert; one at a time, so that there is one moment at a time.

    Args:
        each: calls a function for every expert; by default here, one after another.
    """
    experts = view.experts
    report = result.reports["experts"] = {"rank": rank, "of": experts.hidden, "relative_error": 0.0}
    if rank == experts.hidden:
        return
    routed = RoutedTokens.of(experts, moments)
    reduced = list(each(lambda expert: _reduce(method, routed, expert, rank), range(experts.count)))
    put_experts(result, experts, [(expert.keep, expert.down) for expert in reduced])
    result.errors["experts"] = lambda others: _error_on(RoutedTokens.of(experts, others), reduced, each)
    errors = [(one.error * one.seen.share, one.total * one.seen.share) for one in reduced]
    report |= {
        "selection": method.selection,
        "relative_error": relative(*map(sum, zip(*errors, strict=True))),
        "relative_errors": [relative(one.error, one.total) for one in reduced],
        "tokens": [one.seen.tokens for one in reduced],
        "filled": [one.seen.filled for one in reduced],
    }


def _reduce(method, routed: RoutedTokens, expert: int, rank: int) -> Expert:
    down, seen = routed.experts.down(expert), routed.moment(expert)
    C, scale, centre = metric_of(method, down, seen.moment)
    ridge = relative_ridge(method, C, seen.moment.count / scale)
    fit = nystrom(down.weight, C, rank=rank, ridge=ridge, selection=method.selection)
    new = refitted(down, fit, centre, down.weight.dtype)
    return Expert(fit.keep, new, centre, seen._replace(moment=None), fit.error / scale, _energy(down, C) / scale)


def _energy(down: Dense, C: Tensor) -> float:
    return energy(down.weight.to(C), C).item()


def _error_on(routed: RoutedTokens, reduced: list[Expert], each: Each) -> float:
    """RMS error over RMS output, each expert alone on the tokens it is sent, about the mean that went into its bias."""

    def found(expert: int) -> Tensor:
        one, W = reduced[expert], routed.experts.down(expert).weight.float()
        gap = W.clone()
        gap[:, one.keep] -= one.down.weight.float()
        return energies(routed.activations(expert, *routed.sent(expert)), one.centre, gap, W)

    return relative(*sum(each(found, range(len(reduced))), torch.zeros(2, dtype=torch.float64)).tolist())


def expert_errors(method, view: BlockView, moments: BlockMoments, unit: PrunableModule, least: int) -> dict[int, float]:
    """Rank -> squared relative error of all experts together, for the ranks of ``unit`` from ``least`` on."""
    routed, full = RoutedTokens.of(view.experts, moments), unit.ranks[-1]
    ranks = [rank for rank in unit.ranks if rank >= least]
    curve, total = torch.zeros(full - ranks[0] + 1, dtype=torch.float64), 0.0
    for expert in range(routed.experts.count):
        down, seen = routed.experts.down(expert), routed.moment(expert)
        C, scale, _ = metric_of(method, down, seen.moment)
        energy = _energy(down, C) / scale * seen.share
        ridge = relative_ridge(method, C, seen.moment.count / scale)
        one = error_curve(down.weight, C, least=ranks[0], ridge=ridge, selection=method.selection)
        curve += energy * one.errors
        total += energy
    return {rank: curve[full - rank].item() / total if total else 0.0 for rank in ranks}


def truncate_experts(view: BlockView, rank: int, result: BlockResult) -> None:
    """Experts of their first ``rank`` hidden units."""
    experts, keep = view.experts, torch.arange(rank, device=view.device)
    downs = (experts.down(expert) for expert in range(experts.count))
    put_experts(result, experts, [(keep, Dense(down.weight[:, :rank], down.bias)) for down in downs])
