"""The default: MoDeGPT's shapes, each module fitted to what really reaches it and to what is missing after it.

Nothing is added to the model: every matrix keeps its place and loses rows or columns. A block is compressed in three
stages, each measured on what the stages before it left, on two streams side by side: compressed and dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Self

from ..._utils.processes import dealt
from ...allocation import Allocation, Measured
from ...architectures import BlockView
from ...calibration.experts import STATISTICS as EXPERT_STATISTICS
from ...errors import OptionError, UnsupportedModelError
from ..base import BlockResult, CompressionStep, Curve, PrunableModule
from ..baselines.reap import EXPERT_COUNT, REAP, kept_experts, lost, saliency
from ..modegpt.curves import squared_errors
from ..modegpt.method import MoDeGPT
from ..work import Work, correcting, multiplying
from .attention import decompose_attention, refit_output, values_of
from .mlp import decompose_mlp

EXPERT_STEPS = 16  # parts of a block's experts of which an allocation may remove some


@dataclass(frozen=True)
class Rankfold(MoDeGPT):
    """Options beside those of MoDeGPT, whose ranks and shapes these are.

    Attributes:
        attention_aware: where no residual correction follows, fit values to what attention makes of them, the input of
            the output projection, and refit the whole output projection across heads; ``False``, and before a
            correction: to the values themselves, head by head (MoDeGPT Algorithm 3).
        residual_correction: fit output and down projections to all that the residual stream lacks after them, as far as
            held-out samples confirm; ``False``: to their own dense outputs only. An output projection is refitted where
            queries and keys or values lose dimensions, a down projection where units are removed.
        norm_aware: where a norm follows output and down projections (as in Gemma 2, OLMo 2 and GLM 4), count errors as
            it does: relative to each token's output; ``False``: as they are, so that tokens with large outputs count
            most.
        allow_module_removal: a measured allocation may remove a whole attention or MLP, where that costs less than many
            smaller ones; not with a budget in time or with sparsities of single modules. ``False``: something remains
            of each, because what a module does on other texts is lost with all of it (docs/method.md).
        allow_expert_removal: a measured allocation may remove whole experts, as many from every block, where that costs
            less than narrower ones; all modules share one budget of weights or bytes then, without excluded blocks,
            target or head_dim. ``False``: all stay, because what an expert does on other texts is lost with it.
    """

    name: ClassVar[str] = "rankfold"
    workspace: ClassVar[tuple[float, float]] = (1.0, 5.0)  # a factor; weights, residues, a step
    modes: ClassVar[tuple[str, ...]] = ("sequential",)

    together: ClassVar[Mapping[str, str]] = MappingProxyType({"qk": "vo"})

    allocation: Allocation = field(default=Measured())
    attention_aware: bool = True
    residual_correction: bool = True
    norm_aware: bool = True
    allow_module_removal: bool = False
    allow_expert_removal: bool = False

    def __post_init__(self):
        super().__post_init__()
        others = {"a budget in time": self.budget.is_timed, "sparsities of single modules": bool(self.own_sparsities)}
        of_experts = others | {
            "modules without experts": self.modules is not None and "experts" not in self.modules,
            "exclude_blocks": bool(self.exclude_blocks),
            "head_dim": bool(self.head_dim),
            f"target {self.target}": self.target != "transformers",
        }
        for name, excluded in {"allow_module_removal": others, "allow_expert_removal": of_experts}.items():
            given = next((other for other, is_given in excluded.items() if is_given), None)
            if getattr(self, name) and given and isinstance(self.allocation, Measured):
                raise OptionError(f"{name} does not go with {given}; drop one")

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        if self.allow_expert_removal and architecture.experts is None:
            raise UnsupportedModelError(
                f"{architecture.model_type} has no experts that rankfold can remove; leave allow_expert_removal out"
            )
        return super().supported_modules(architecture, view)

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        found = super().prunable_modules(view)
        # Nothing but a projector tells the language model of the image.
        if not self.allow_module_removal or not isinstance(self.allocation, Measured) or view.architecture.is_projector:
            return found
        there = {unit.module for unit in found}
        whole = {"mlp"} | ({"qk", "vo"} if {"qk", "vo"} <= there and not self.head_dim else set())
        return [
            replace(unit, ranks=(0, *unit.ranks), sizes=(0, *unit.sizes)) if unit.module in whole else unit
            for unit in found
        ]

    def expert_counts(self, view: BlockView) -> PrunableModule | None:
        if not self.allow_expert_removal or not isinstance(self.allocation, Measured):
            return None
        if "experts" not in self.supported_modules(view.architecture, view):
            return None
        experts = view.experts
        least = max(experts.active, experts.count // 2)  # with fewer, effects of experts and of widths would not add up
        steps = {round(experts.count * (1 - n / EXPERT_STEPS)) for n in range(EXPERT_STEPS // 2 + 1)}
        (found,) = REAP().prunable_modules(view)
        ranks = tuple(rank for rank in found.ranks if rank in steps and rank >= least)
        return replace(found, ranks=ranks, sizes=tuple(map(found.size, ranks))) if len(ranks) > 1 else None

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        if EXPERT_COUNT not in ranks:
            return super().parameter_change(view, ranks)
        others = {module: rank for module, rank in ranks.items() if module != EXPERT_COUNT}
        change, indices = super().parameter_change(view, others)
        whole, chosen_by = REAP().parameter_change(view, {EXPERT_COUNT: ranks[EXPERT_COUNT]})
        if "experts" in ranks:  # what experts that go would have lost has gone with them
            narrower, _ = super().parameter_change(view, {"experts": ranks["experts"]})
            change -= narrower // view.experts.count * (view.experts.count - ranks[EXPERT_COUNT])
        return change + whole, indices + chosen_by

    def statistics(self, view: BlockView) -> set[str]:
        ranks = {module: 1 for module in self.supported_modules(view.architecture, view)}
        return set().union(*(stage.statistics for stage in self.stages(view, ranks)))

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """Queries, keys, values; the output projection on what these became; then, on the new attention, which experts
        go, and MLP and experts with those that stay."""
        full, corrected = view.attention.head_dim, self.follows(view)
        norms = self._norms(view)
        found = []
        if ranks.keys() & {"qk", "vo"}:
            needed = self._statistics_of_modules(view)
            needed = norms.union(*(needed[module] for module in ranks.keys() & {"qk", "vo"}))
            found.append(
                CompressionStep(needed, lambda view, moments, _: decompose_attention(self, view, moments, ranks))
            )
            if corrected and 0 < min(ranks.get("qk", full), ranks.get("vo", full)) < full:
                module = "vo" if "vo" in ranks else "qk"
                refit = partial(refit_output, self, module=module)
                found.append(CompressionStep({"attention_output", "attention_feedback"}, refit))
        if EXPERT_COUNT in ranks:
            found += REAP().stages(view, {EXPERT_COUNT: ranks[EXPERT_COUNT]})
        pieces = []
        if "mlp" in ranks:
            # Beside experts nothing says which of them a correction would belong to.
            needed = norms | ({"mlp_hidden", "mlp_feedback"} if corrected and view.experts is None else {"mlp_hidden"})
            pieces.append(CompressionStep(needed, partial(decompose_mlp, self, ranks={"mlp": ranks["mlp"]})))
        if "experts" in ranks:
            mine = partial(decompose_mlp, self, ranks={"experts": ranks["experts"]}, each=dealt)
            pieces.append(CompressionStep(norms | EXPERT_STATISTICS, mine, shared=("experts",)))
        if pieces:
            needed = set().union(*(piece.statistics for piece in pieces))
            found.append(CompressionStep(needed, partial(decompose_mlp, self, ranks=ranks), tuple(pieces)))
        if ranks.keys() & {"qk", "vo"} and len(found) > 1:
            found[1] = found[1]._replace(attention_stays=True)
        return found

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        found, attention = super().work(view, ranks), view.attention
        found += REAP().work(view, ranks)
        width, sent, full = view.width, attention.heads * attention.head_dim, attention.head_dim
        if self.follows(view):
            if "mlp" in ranks and view.experts is None and 0 < ranks["mlp"] < view.mlp.hidden:
                found += correcting(view.mlp.hidden, width)
            if 0 < min(ranks.get("qk", full), ranks.get("vo", full)) < full:
                found += correcting(sent, width)
        return found

    def _work_of_values(self, view: BlockView) -> Work:
        found, attention = super()._work_of_values(view), view.attention
        if not self.attends(view):
            return found
        width, sent = view.width, attention.heads * attention.head_dim
        refit = Work({("cholesky", sent): 1.0, ("solve", sent): width / sent})
        return found + refit + multiplying(2 * width, sent, sent)

    def gradients(self, view: BlockView) -> set[str]:
        found = super().gradients(view)
        return found | self._norms(view) if found else found

    def _norms(self, view: BlockView) -> set[str]:
        return {"norms_after"} if self.norm_aware and view.architecture.norms_after else set()

    def _statistics_of_modules(self, view: BlockView) -> dict[str, set[str]]:
        needed, sent = super()._statistics_of_modules(view), {"attention_output"}
        if self.attends(view):
            return needed | {"vo": sent}
        # What is left of an attention that goes is the mean of what it sent.
        return needed | {"vo": needed["vo"] | (sent if self.allow_module_removal else set())}

    def alone(self, view: BlockView) -> Self:
        return replace(self, residual_correction=False, attention_aware=self.attends(view))

    def follows(self, view: BlockView) -> bool:
        """Whether a residual correction can follow in this block."""
        return self.residual_correction and view.is_plain_residual

    def attends(self, view: BlockView) -> bool:
        """Whether values are fitted to what attention makes of them."""
        return self.attention_aware and not self.follows(view)

    def work_of_curve(self, view: BlockView, unit: PrunableModule, least: int) -> Work:
        if unit.module == EXPERT_COUNT:
            return REAP().work(view, {EXPERT_COUNT: least})
        return super().work_of_curve(view, unit, least)

    def curve(self, view: BlockView, moments, unit: PrunableModule, least: int) -> Curve:
        if unit.module == EXPERT_COUNT:
            found, groups = saliency(view.experts, moments), view.experts.groups
            kept = {rank: kept_experts(found.scores, rank, groups) for rank in unit.ranks if rank >= least}
            return Curve({rank: lost(found, experts) ** 2 for rank, experts in kept.items()})
        return squared_errors(self, view, moments, unit, least, values_of(self, view))

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        raise NotImplementedError("this method has stages")
