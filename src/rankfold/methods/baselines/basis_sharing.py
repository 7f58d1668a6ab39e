r"""Basis Sharing (arXiv:2410.03765): layers of neighbouring blocks as combinations of the same basis.

.. math:: W_i \approx B_i A, \qquad [B_1; \dots; B_k] A = \mathrm{svd}_R \left( [W_1; \dots; W_k] E \right) E^{-1}

with ``E E^T`` the second moment of the inputs of all blocks of a group together. ``A`` is stored in the first one.

Shape legend: O outputs, N inputs, R rank, k blocks of a group.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..._utils.memory import release_memory
from ...allocation import Allocation, Budget, Parameters, Uniform
from ...architectures import BlockView, Dense
from ...calibration.moments import BlockMoments, Moment
from ...errors import OptionError, UnsupportedModelError
from ...linalg.lowrank import metric_error, shared_basis
from ...linalg.preconditioner import Preconditioner, preconditioner
from ..base import BlockResult, PrunableModule
from ..latentllm.attention import ATTENTION
from ..latentllm.factor import Fit, Input, local, moved_bias
from ..latentllm.layout import INPUTS, Slot, dense_projections, slots
from ..latentllm.measures import OutputError
from ..latentllm.report import Report
from ..result import Latent, Projection, put_attention, put_projection
from ..work import Work, multiplying, times
from .layers import FitLayer, by_input, fit_layers
from .svd_family import SVDLLM

ALONE = {"precondition": "rootcov", "joint": "none", "junction": "left", "bits": 0, "sparse": 0.0}
ALONE |= {"shared_qkv": False, "split_head": False, "head_junction": False}


@dataclass(frozen=True)
class BasisSharing(SVDLLM):
    """One basis for the same layer of neighbouring blocks, coefficients for each: Basis Sharing (arXiv:2410.03765).

    Queries, keys, values, gate and up share; outputs of attention and ``down`` do not, as in the paper, and are those
    of SVD-LLM. Basis and coefficients come from the dense model, in both modes. Where a model has experts, its MLPs
    share nothing. Left out: bases wider than a layer's outputs, the update of the coefficients, training afterwards.

    Attributes:
        group_size: blocks that share a basis; the last group may be smaller.
    """

    name: ClassVar[str] = "basis-sharing"
    # Beside that of svd-llm five Gram matrices as wide as the model, and moments of the group.
    workspace: ClassVar[tuple[float, float]] = (1.0, 6.0)
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Uniform,)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters,)
    targets: ClassVar[tuple[str, ...]] = ("transformers",)
    can_exclude_blocks: ClassVar[bool] = False
    takes_experts: ClassVar[bool] = False

    # Factors as they are: any other scale would be that of one layer.
    junction: str = "left"
    group_size: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 1:
            raise OptionError(f"group_size must be >= 1, got {self.group_size}")
        for name, value in ALONE.items():
            if (got := getattr(self, name)) != value:
                raise OptionError(
                    f"method {self.name} has plain factors in the metric of the inputs, got {name}={got}; leave it at "
                    f"{value}, or take method svd-llm"
                )

    def sharing(self, view: BlockView) -> set[str]:
        """Return the modules of a block that have a basis in common with other blocks."""
        shared = {"q", "k", "v"} if view.architecture.experts else {"q", "k", "v", "gate", "up"}
        return shared & set(self.supported_modules(view.architecture, view))

    def first(self, index: int) -> int:
        """Return the block that stores the bases of the group of a block."""
        return index - index % self.group_size

    def shared(self, view: BlockView) -> set[str]:
        return {INPUTS[module] for module in self.sharing(view)} if self.group_size > 1 else set()

    def group(self, index: int, blocks: int) -> range:
        return range(self.first(index), min(self.first(index) + self.group_size, blocks))

    def pool(self, members: Iterable[tuple[BlockView, BlockMoments]]) -> BlockMoments:
        """Sum over the members the Gram matrix of the weights of each module, and the moments of their inputs."""
        found: BlockMoments = {}
        for view, moments in members:
            dense, summands = dense_projections(self, view), {}
            for module in self.sharing(view):
                W, centred = dense[module].weight.double(), self.refits_bias(dense[module])
                moment = moments[INPUTS[module]]
                summands[f"{module}_weights"] = W.T @ W
                summands[_pooled(INPUTS[module], centred)] = moment.covariance() if centred else moment.second_moment()
            for name, summand in summands.items():
                found[name] = Moment(1.0, second=found[name].second + summand if name in found else summand)
        return found

    def joined(self, modules: list[PrunableModule], views: Sequence[BlockView]) -> list[PrunableModule]:
        known, found = {module.key: module for module in modules}, []
        for module in modules:
            members = self.group(module.block, len(views))
            if len(members) == 1 or module.module not in self.sharing(views[module.block]):
                found.append(module)
            elif module.block == members[0]:
                found.append(self._of_group(module.module, [views[block] for block in members]))
            elif (members[0], module.module) not in known:
                raise self._differ(views[module.block], module.module)
        return found

    def _of_group(self, module: str, views: list[BlockView]) -> PrunableModule:
        """Return the module of all blocks of a group: the ranks with which it has fewer weights than they have."""
        layers = [slots(self, view).get(module) for view in views]
        own, *others = layers
        for view, other in zip(views[1:], others, strict=True):
            if other is None or own is None or (other.out, other.wide) != (own.out, own.wide):
                raise self._differ(view, module)
        assert own is not None
        dense = len(views) * own.dense
        sizes = {
            r: r * (own.wide + len(views) * own.out) for r in range(self.rank_multiple, own.full, self.rank_multiple)
        }
        sizes = {r: size for r, size in sizes.items() if size < dense} | {own.full: dense}
        first, *members = (view.index for view in views)
        return PrunableModule(first, module, tuple(sizes), tuple(sizes.values()), members=tuple(members))

    def _differ(self, view: BlockView, module: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{view.path} and the block whose basis it would have differ in module {module!r}; leave it out of "
            "modules, or take group_size=1"
        )

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        change, added = super().parameter_change(view, ranks)
        return change - self._stored_before(view, ranks), added

    def float_change(self, view: BlockView, ranks: dict[str, int]) -> int:
        return super().float_change(view, ranks) - self._stored_before(view, ranks)

    def _stored_before(self, view: BlockView, ranks: dict[str, int]) -> int:
        """Count the numbers of bases of this block that the first one of its group stores."""
        if view.index == self.first(view.index):
            return 0
        shared = self.sharing(view)
        return sum(rank * slot.wide for slot, rank in self._lower(view, ranks) if slot.name in shared)

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        found = super().work(view, ranks)
        for slot, _ in self._lower(view, ranks):
            if self.group_size > 1 and slot.name in self.sharing(view):
                found += times(multiplying(slot.wide, slot.out, slot.wide), self.group_size)
                found += Work({("eigh", slot.wide): 1.0, ("cholesky", slot.wide): 1.0})
        return found

    def decompose(self, view: BlockView, moments: BlockMoments, ranks: dict[str, int]) -> BlockResult:
        layout, dense, latents = slots(self, view), dense_projections(self, view), dict[str, Latent]()
        result = BlockResult()
        for statistic, some in by_input(ranks).items():
            latents |= fit_layers(result, self, layout, dense, moments, some, statistic, self._fit(moments))
            release_memory()
        self._put(result, view, dense | {m: self._read_from_first(view, m, latent) for m, latent in latents.items()})
        return result

    def _fit(self, moments: BlockMoments) -> FitLayer:
        """Return what fits a layer of an input: with the basis of its group, where it shares one."""

        @functools.cache
        def metric(name: str) -> Preconditioner:
            return preconditioner(moments[name].second, self.precondition, ridge=self.ridge)

        def fit(slot: Slot, dense: Dense, given: Input, rank: int) -> Fit:
            gram = moments.get(f"{slot.name}_weights")
            if gram is None:
                return local(slot, dense, given, rank)
            return combined(slot, dense, given, rank, gram.second, metric(_pooled(given.statistic, given.centred)))

        return fit

    def _read_from_first(self, view: BlockView, module: str, latent: Latent) -> Latent:
        """Describe where the basis of a layer is stored, if that is another block."""
        first = self.first(view.index)
        if first == view.index or module not in self.sharing(view):
            return latent
        path = f"{view.attention.spec.path}.{module}_proj" if module in ATTENTION else view.mlp.paths[module]
        return Latent(latent.spec | {"basis": f"{view.architecture.path_of(first)}.{path}"}, latent.tensors)

    def _put(self, result: BlockResult, view: BlockView, layers: Mapping[str, Projection]) -> None:
        now = {module for module, layer in layers.items() if isinstance(layer, Latent)}
        for module, path in (view.mlp.paths if view.mlp else {}).items():
            if module in now:
                put_projection(result, path, layers[module])
        if now & set(ATTENTION):
            ranks = {module: report["rank"] for module, report in result.reports.items()}
            width, cached = view.attention.head_dim, self.cached_latents(view, ranks)
            attention = {module: layers[module] for module in ATTENTION if module in layers}
            put_attention(result, view.attention, attention, width, width, None, cached)


def combined(slot: Slot, dense: Dense, given: Input, rank: int, gram: Tensor, metric: Preconditioner) -> Fit:
    """Return the basis of a group, and the coefficients of one layer of it.

    Args:
        gram: ``(N, N)`` sum of ``W^T W`` over the group.
        metric: of the inputs of the whole group.
    """
    W = dense.weight.double()
    A, V = shared_basis(gram, metric, rank=rank)
    B = metric.apply(W) @ V
    error = metric_error(W - B @ A, W, given.C)
    report = Report(rank, slot.full, "shared basis", error, clamped=metric.clamped or None)
    fit = Fit(B, A, dense.bias, report, OutputError(slot.name, given.statistic, dense, given.centred))
    return fit._replace(bias=moved_bias(W, fit, dense.bias, given.mean)) if given.centred else fit


def _pooled(statistic: str, centred: bool) -> str:
    """Name the moment of an input of all blocks of a group."""
    return f"{statistic} of the group" + (", centred" if centred else "")
