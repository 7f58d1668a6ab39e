r"""Whole experts go, and with each its row of the router: REAP (arXiv:2510.13999).

The saliency of an expert is the mean, over the tokens sent to it, of the norm of what it adds to the block's output:

.. math:: S_j = \frac{1}{|X_j|} \sum_{x \in X_j} g_j(x) \, \|f_j(x)\|_2

with the router's weight ``g`` and the expert's output ``f``. What is left is the family's own class with fewer experts.

Shape legend: E experts, r of them kept, n tokens, D model width, F hidden width of an expert.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..._utils.processes import Each
from ...allocation import Allocation, Budget, Bytes, Parameters, Uniform
from ...architectures import BlockView, ExpertsView, from_config
from ...calibration.experts import INPUT, ROUTING, RoutedTokens
from ...calibration.moments import BlockMoments
from ...errors import UnsupportedModelError
from ..base import BlockResult, CompressionStep, Method, PrunableModule
from ..work import Work, multiplying

EXPERT_COUNT = "expert_count"  # the module whose rank is the number of experts of a block


class Saliency(NamedTuple):
    """What the experts of a block do on some tokens."""

    scores: Tensor  # (E,) S_j; 0 where no token was sent
    energies: Tensor  # (E,) sum of (g ||f||)^2
    tokens: Tensor  # (E,) that were sent to each


@dataclass(frozen=True)
class REAP(Method):
    """Remove the experts that add least to what the router sends them: REAP (arXiv:2510.13999).

    All blocks keep the same number of experts, the largest with which the budget holds: the config has one number. A
    token is sent to as many experts as before, or to all that are left. Shared experts, blocks without experts and
    everything else stay.
    """

    name: ClassVar[str] = "reap"
    all_modules: ClassVar[tuple[str, ...]] = (EXPERT_COUNT,)
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Uniform,)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters, Bytes)
    one_rank: ClassVar[bool] = True
    can_exclude_blocks: ClassVar[bool] = False
    needs_experts: ClassVar[bool] = True
    workspace: ClassVar[tuple[float, float]] = (0.0, 0.0)

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        if architecture.experts is None:
            raise UnsupportedModelError(
                f"reap removes experts, and {architecture.model_type} has none that rankfold can remove; take another "
                "method, or a model with experts (docs/models.md)"
            )
        return (EXPERT_COUNT,)

    def statistics(self, view: BlockView) -> set[str]:
        return {INPUT, ROUTING} if view.experts else set()

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        self.supported_modules(view.architecture, view)
        if view.experts is None:
            return []
        each = (
            sum(tensor.numel() for tensor, _ in _of_experts(view).values() if tensor.dim() >= 2) // view.experts.count
        )
        ranks = view.experts.counts
        return [PrunableModule(view.index, EXPERT_COUNT, ranks, tuple(rank * each for rank in ranks))]

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        if view.experts is None or EXPERT_COUNT not in ranks:
            return 0, 0
        parameters = {name for name, _ in view.module.named_parameters()}
        sizes = {name: tensor.numel() // view.experts.count for name, (tensor, _) in _of_experts(view).items()}
        whole = sum(size for name, size in sizes.items() if name in parameters)
        chosen_by = sum(sizes.values()) - whole  # written in fp32
        lost = view.experts.count - ranks[EXPERT_COUNT]
        return -lost * whole, -4 * lost * chosen_by

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        """Count the experts' outputs, of tokens as if there were as many as 128 samples of 2,048."""
        experts: ExpertsView | None = view.experts
        if experts is None or EXPERT_COUNT not in ranks:
            return Work()
        return multiplying(experts.active * experts.hidden, experts.per_unit, 128 * 2048)

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """One step, of which several processes share the experts."""
        (step,) = super().stages(view, ranks)
        return [step._replace(pieces=(self._step(step.statistics, ranks, is_shared=True),))]

    def decompose(self, view: BlockView, moments: BlockMoments, ranks: dict[str, int], each: Each = map) -> BlockResult:
        experts: ExpertsView | None = view.experts
        if experts is None:
            return BlockResult()
        rank, found = ranks[EXPERT_COUNT], saliency(experts, moments, each)
        keep = kept_experts(found.scores, rank, experts.groups)
        report: dict[str, Any] = {
            "rank": rank,
            "of": experts.count,
            "relative_error": lost(found, keep),
            "kept": keep.tolist(),
            "saliency": found.scores.tolist(),
            "routed_tokens": found.tokens.tolist(),
        }
        result = BlockResult(reports={EXPERT_COUNT: report})
        if rank < experts.count:
            _put(view, keep, result)
            result.errors[EXPERT_COUNT] = lambda others: lost(saliency(experts, others, each), keep)
        return result


def saliency(experts: ExpertsView, moments: BlockMoments, each: Each = map) -> Saliency:
    """Compute what every expert adds to the output of its block, on the tokens that it is sent.

    Args:
        each: calls a function for every expert; by default here, one after another.
    """
    routed = RoutedTokens.of(experts, moments)

    def of_expert(expert: int) -> tuple[Tensor, Tensor, int]:
        which, weights = routed.sent(expert)
        down = experts.down(expert)
        norms = torch.zeros(2, dtype=torch.float64)
        for hidden, w in routed.activations(expert, which, weights):
            sent = hidden @ down.weight.float().T
            sent = sent if down.bias is None else sent + w[:, None] * down.bias.float()
            size = torch.linalg.vector_norm(sent, dim=1).double().cpu()
            norms += torch.stack([size.sum(), size.square().sum()])
        return norms[0] / max(len(which), 1), norms[1], len(which)

    scores, energies, tokens = zip(*each(of_expert, range(experts.count)), strict=True)
    return Saliency(torch.stack(scores), torch.stack(energies), torch.tensor(tokens))


def kept_experts(scores: Tensor, rank: int, groups: int = 1) -> Tensor:
    """Return the experts that stay, ``(r,)`` ascending: the largest scores, as many of each group; of equals the first.

    Args:
        scores: ``(E,)``; experts of a group stand side by side.
        rank: r, a multiple of ``groups``.
    """
    best = scores.view(groups, -1).argsort(dim=1, descending=True, stable=True)[:, : rank // groups]
    first = torch.arange(groups)[:, None] * (len(scores) // groups)
    return (best + first).flatten().sort().values


def lost(found: Saliency, keep: Tensor) -> float:
    """Return the RMS of what the removed experts add over that of what all add."""
    total = found.energies.sum().item()
    return max(0.0, 1 - found.energies[keep].sum().item() / total) ** 0.5 if total > 0 else 0.0


def _of_experts(view: BlockView) -> dict[str, tuple[Tensor, int]]:
    """Return the tensors beside and in the experts that have a place for each, and along which dimension, by name."""
    found, spec = {}, view.experts.describe_fewer(view.experts.count - 1)
    for path, owner in view.experts_owners.items():
        with torch.device("meta"):
            fewer = from_config(spec, owner, view.config).state_dict()
        for name, tensor in owner.state_dict().items():
            if tensor.shape != (less := fewer[name].shape):
                dim = next(dim for dim, size in enumerate(tensor.shape) if size != less[dim])
                found[f"{path}.{name}"] = (tensor, dim)
    return found


def _put(view: BlockView, keep: Tensor, result: BlockResult) -> None:
    """Replace what holds the experts and their router by the same with fewer."""
    places = _of_experts(view)
    for path, owner in view.experts_owners.items():
        result.modules[path] = view.experts.describe_fewer(len(keep))
        for name, tensor in owner.state_dict(prefix=f"{path}.").items():
            kept = tensor.index_select(places[name][1], keep.to(tensor.device)) if name in places else tensor
            result.state[name] = kept
