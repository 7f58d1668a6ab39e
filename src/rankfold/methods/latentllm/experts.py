"""Experts through latents: gate and up of each as one, and its down projection, on the tokens that are sent to it.

Shape legend: E experts, n tokens, D model width, F hidden width of an expert.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._utils.memory import release_memory
from ..._utils.processes import Each
from ...architectures import BlockView, Dense, ExpertsView
from ...calibration.experts import ExpertMoment, RoutedTokens, energies
from ...calibration.moments import BlockMoments
from ...linalg.psd import relative
from ..base import BlockResult
from ..result import Latent, describe, tensors_of
from .factor import local, prepare
from .layout import EXPERTS, Slot, slots
from .measures import as_dense
from .storing import store_all


class Side(NamedTuple):
    """One projection of one expert, latent."""

    latent: Latent
    report: dict
    seen: ExpertMoment  # without the moment
    energy: float  # squared output of the dense one, per unit of squared weight
    centre: Tensor | None  # of its input, where its bias took the mean


def decompose_experts(
    method, view: BlockView, moments: BlockMoments, ranks: dict[str, int], each: Each = map
) -> BlockResult:
    """The sides of all experts in ``ranks``, each fitted to its own output (LatentLLM Sec. 3.2) on weighted tokens.

    One expert at a time, so that there is one moment at a time.

    Args:
        each: calls a function for every expert; by default here, one after another.
    """
    experts, layout, result = view.experts, slots(method, view), BlockResult()
    routed = RoutedTokens.of(experts, moments)
    sides = {
        module: list(each(partial(_latent, method, layout[module], routed, rank=rank), range(experts.count)))
        for module, rank in ranks.items()
    }
    _put(result, experts, sides)
    for module, found in sides.items():
        result.reports[module] = _report(found)
        result.errors[module] = partial(_error_on, experts, module, found, each)
    return result


def _of(experts: ExpertsView, module: str, expert: int) -> Dense:
    return experts.rising(expert) if module == EXPERTS[0] else experts.down(expert)


def _latent(method, slot: Slot, routed: RoutedTokens, expert: int, rank: int) -> Side:
    dense = _of(routed.experts, slot.name, expert)
    seen = routed.input_moment(expert) if slot.name == EXPERTS[0] else routed.moment(expert)
    moments = {slot.name: seen.moment}
    given = prepare(method, moments, slot.name, centred=method.refits_bias(dense))
    fits = {slot.name: local(slot, dense, given, rank)}
    latents, reports, _ = store_all({slot.name: slot}, fits, {slot.name: dense}, moments)
    W, centre = dense.weight.double(), given.mean if given.centred else None
    moment = seen.moment
    C = moment.second_moment() if centre is None else moment.covariance()
    energy = ((W @ C) * W).sum().item()
    release_memory()
    return Side(latents[slot.name], reports[slot.name].to_dict(), seen._replace(moment=None), energy, centre)


def _report(found: list[Side]) -> dict:
    """Of all experts together: errors counted as they enter the block's output."""
    errors = [one.report["relative_error"] for one in found]
    whole = [one.energy * one.seen.share for one in found]
    lost = sum(error**2 * energy for error, energy in zip(errors, whole, strict=True))
    return found[0].report | {
        "relative_error": relative(lost, sum(whole)),
        "relative_errors": errors,
        "tokens": [one.seen.tokens for one in found],
        "filled": [one.seen.filled for one in found],
    }


def _put(result: BlockResult, experts: ExpertsView, sides: dict[str, list[Side]]) -> None:
    """Replace the experts by ones with layers of their own."""
    path = experts.spec.path
    spec: dict[str, Any] = {"kind": "latent_experts", "experts": experts.count}
    for module, name in zip(EXPERTS, ("rising", "falling"), strict=True):
        for expert in range(experts.count):
            made = sides[module][expert].latent if module in sides else _of(experts, module, expert)
            spec[name] = describe(made)
            result.state.update({f"{path}.{name}.{expert}.{key}": t for key, t in tensors_of(made).items()})
    result.modules[path] = spec


def _error_on(experts: ExpertsView, module: str, found: list[Side], each: Each, moments: BlockMoments) -> float:
    """RMS error over RMS output, each expert alone on the tokens it is sent, about the mean that went into its bias."""
    routed = RoutedTokens.of(experts, moments)

    def of_expert(expert: int) -> Tensor:
        one, W, sent = found[expert], _of(experts, module, expert).weight.float(), routed.sent(expert)
        gap = W - as_dense(one.latent).weight.to(W)
        parts = routed.inputs(*sent) if module == EXPERTS[0] else routed.activations(expert, *sent)
        return energies(parts, one.centre, gap, W)

    return relative(*sum(each(of_expert, range(len(found))), torch.zeros(2, dtype=torch.float64)).tolist())
