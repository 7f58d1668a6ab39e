"""What the methods that only drop units have in common: all but the choice of units.

Shape legend: n units, r of them kept, c channels each sends into the output projection, D model width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ....architectures import BlockView, Dense
from ....calibration.moments import BlockMoments, Moment
from ....errors import UnsupportedModelError
from ....linalg.psd import relative
from ....linalg.slicing import channels_of, lost_energy
from ...base import BlockResult, NarrowingMethod, PrunableModule
from ...work import Work, multiplying, passing, times
from .units import Sliceable, sliceable


@dataclass(frozen=True)
class Slicing(NarrowingMethod):
    """Drop hidden units of the MLP and whole heads; the weights of the others stay as they are.

    Modules: ``mlp``, whose rank is the number of hidden units, and ``heads``, whose rank is the number of key/value
    heads, each with all its query heads. Heads go one at a time, whatever ``rank_multiple`` is.
    """

    all_modules: ClassVar[tuple[str, ...]] = ("mlp", "heads")

    def keep(self, units: Sliceable, moments: BlockMoments, rank: int) -> Tensor:
        """``(r,)`` ascending: the units that stay."""
        raise NotImplementedError

    def takes_mean(self, output: Dense) -> bool:
        """Whether the bias of the output projection takes what is lost on average; it gets one where it has none."""
        return False

    def lost(self, units: Sliceable, moments: BlockMoments, keep: Tensor) -> Tensor:
        """``(D, n c)`` the output projection minus the one that is left, at the same channels.

        Where nothing is refitted: its columns of the units that go.
        """
        lost = units.output.weight.clone()
        lost[:, channels_of(keep, units.channels)] = 0
        return lost

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        reasons = {}
        if view.mlp is None and view.experts:
            reasons["mlp"] = "its MLP is a mixture of experts, whose stacked weights are not taken"
        if architecture.attention.unsupported_reason:
            reasons["heads"] = architecture.attention.unsupported_reason
        elif view.attention.spec.position == "alibi" or getattr(view.config, "alibi", False):
            reasons["heads"] = "ALiBi gives every head a bias by its number, and fewer heads would get those of others"
        elif view.attention.kv_heads == 1:
            reasons["heads"] = "all its query heads read one key/value head, which cannot go"
        elif view.attention.norms and view.attention.spec.norm_over == "all heads":
            reasons["heads"] = "it normalises queries and keys over all heads together, and fewer would change the norm"
        for module in self.modules or ():
            if module in reasons:
                rest = ",".join(m for m in self.all_modules if m not in reasons) or "no module of it"
                raise UnsupportedModelError(
                    f"{architecture.model_type} cannot take module {module!r}: {reasons[module]}; it can take {rest}"
                )
        wanted = self.modules if self.modules is not None else self.all_modules
        missing = {"heads"} if view.attention.spec.unsupported_reason else set()  # blocks may differ in kind
        missing |= {"mlp"} if view.mlp is None else set()
        return tuple(m for m in self.all_modules if m in wanted and m not in reasons.keys() | missing)

    def statistics(self, view: BlockView) -> set[str]:
        there = sliceable(view)
        return {there[module].statistic for module in self.supported_modules(view.architecture, view)}

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        there, found = sliceable(view), []
        for module in self.supported_modules(view.architecture, view):
            units = there[module]
            step = 1 if module == "heads" else self.rank_multiple
            ranks = (*range(step, units.count, step), units.count)
            found.append(PrunableModule(view.index, module, ranks, tuple(r * units.per_unit for r in ranks)))
        return found

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        there, change = sliceable(view), 0
        for module, rank in ranks.items():
            units = there[module]
            lost = units.count - rank
            change -= lost * (units.per_unit + units.biases_per_unit)
            if lost and units.output.bias is None and self.takes_mean(units.output):
                change += units.output.weight.shape[0]
        return change, 0

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        lost = view.attention.kv_heads - ranks["heads"] if "heads" in ranks else 0
        return view.attention.cached - 2 * view.attention.head_dim * lost

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        there, found = sliceable(view), Work()
        for module in (module for module, rank in ranks.items() if rank < there[module].count):
            out, wide = there[module].output.weight.shape
            found += times(multiplying(out, wide, wide), 2) + passing(wide * wide, 10)
        return found

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        there, result = sliceable(view), BlockResult()
        for module, rank in ranks.items():
            units = there[module]
            result.reports[module] = {"rank": rank, "of": units.count, "relative_error": 0.0}
            if rank < units.count:
                self._slice(module, units, moments, rank, result)
        return result

    def _slice(self, module: str, units: Sliceable, moments: BlockMoments, rank: int, result: BlockResult) -> None:
        keep, moment, output = self.keep(units, moments, rank), moments[units.statistic], units.output
        lost = self.lost(units, moments, keep).double()
        weight = (output.weight - lost)[:, channels_of(keep, units.channels)].to(output.weight.dtype)
        centre, bias = moment.mean if self.takes_mean(output) else None, output.bias
        if centre is not None:
            sent = lost @ centre
            bias = (sent if bias is None else sent + bias.double()).to(weight.dtype)
        units.put(result, keep, Dense(weight, bias))

        def error(other: Moment) -> float:
            C = other.second_moment() if centre is None else other.about(centre)
            return relative(*torch.stack(lost_energy(output.weight, C, lost)).tolist())

        result.errors[module] = lambda others: error(others[units.statistic])
        result.reports[module]["relative_error"] = error(moment)
