"""MoDeGPT (arXiv:2408.09632, ICLR 2025): Nystrom for the MLP, column selection for query-key, SVD for value-output.

Nothing is added to the model: every matrix keeps its place and loses rows or columns.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import ClassVar, Literal

from ..._utils.processes import Each
from ...architectures import BlockView
from ...calibration.experts import STATISTICS as EXPERT_STATISTICS
from ...calibration.moments import BlockMoments, Moment
from ...errors import OptionError, UnsupportedModelError, method_option
from ...linalg.column_row import relative_cost
from ..base import BlockResult, CompressionStep, Curve, MeasurableMethod, PrunableModule
from ..targets import TARGETS
from ..work import Work, comparing_ranks, eliminating, inverting, multiplying, refitting, times
from .attention import GRADIENT as ATTENTION_GRADIENT
from .attention import OF_MODEL, compress_attention, is_free, values_move
from .curves import squared_errors
from .experts import reduce_experts, truncate_experts
from .mlp import GRADIENT as MLP_GRADIENT
from .mlp import reduce_mlp
from .norms import SQUARES, norm_parameters
from .truncation import truncate_attention, truncate_mlp

EXPERT_STEP = 8  # grouped products of all experts want rows of whole 16 bytes


@dataclass(frozen=True)
class MoDeGPT(MeasurableMethod):
    """Options of MoDeGPT beside those of every method.

    Attributes:
        selection: which hidden units stay. ``obs`` (optimal brain surgeon): they go one after another, each time the
            one whose loss after refitting the others is least. ``leverage``: the largest ridge leverage scores, the
            paper's Algorithm 1, which drops collinear units all together (docs/papers.md).
        selection_qk: which query-key dimensions stay. ``obs``: by the exact error of the scores with keys centred over
            the window, as softmax sees them. ``norm``: the largest norm scores, the paper's Algorithm 2.
        gqa: value-output under grouped queries: ``joint`` is the optimum over the group; ``paper`` ignores the output
            projections (App. B.1). The same where every query head has its own value head.
        qk: query-key where no rotary embedding sits between them: ``svd``, the optimum, or ``cr``, the paper's
            selection. With rotary embedding it is always a selection of pairs.
        bias_refit: where a projection has a bias, fit the covariance and move the mean into the bias (LatentLLM App.
            B.2); ``False`` keeps the bias as it is and fits the second moment, as the paper does.
        ridge: damping lambda of the MLP's moment, in the unit that ``ridge_scale`` names.
        ridge_scale: ``relative``: a fraction of the mean diagonal of the moment, the same for any number of tokens.
            ``absolute``: a number that is added to the sum over all calibration tokens; the paper takes 1 (App. B.2).
        output_weighting: which errors at the output of a module count. ``none``: all alike. ``fisher``: by the second
            moment of the gradient of the loss there, from one backward pass over a few windows (docs/method.md). It
            decides which units and which dimensions of values stay; the weights fitted to these are best either way.
        head_dim: width of every head of the result, even. Queries and keys keep the same rotary pairs in the whole
            model, and values as many dimensions, so that a stock model can have such heads (docs/serve.md); the budget
            chooses the other ranks around it. 0: every block has widths, and every key head pairs, of its own.
    """

    name: ClassVar[str] = "modegpt"
    workspace: ClassVar[tuple[float, float]] = (1.0, 2.5)  # the inverse; weights, and these transposed
    all_modules: ClassVar[tuple[str, ...]] = ("mlp", "experts", "qk", "vo")
    targets: ClassVar[tuple[str, ...]] = tuple(TARGETS)

    selection: Literal["obs", "leverage"] = "obs"
    selection_qk: Literal["obs", "norm"] = "obs"
    gqa: Literal["joint", "paper"] = "joint"
    qk: Literal["svd", "cr"] = "svd"
    bias_refit: bool = True
    ridge: float = 1e-4
    ridge_scale: Literal["relative", "absolute"] = "relative"
    output_weighting: Literal["none", "fisher"] = "none"
    head_dim: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not self.ridge > 0:
            raise OptionError(f"ridge must be > 0, got {self.ridge}; the default is 1e-4 of the moment's mean diagonal")
        for key, value in {"selection": "leverage", "gqa": "paper"}.items():
            if self.output_weighting != "none" and getattr(self, key) == value:
                raise OptionError(
                    f"{key}={value} does not look at outputs, so output_weighting={self.output_weighting} has nothing "
                    "to weigh; drop one"
                )
        self._check_head_dim()

    def _check_head_dim(self) -> None:
        if self.head_dim < 0 or self.head_dim % 2:
            raise OptionError(f"head_dim must be even and >= 0, got {self.head_dim}; rotary embedding turns pairs")
        if not self.head_dim:
            return
        if self.own_sparsities or (self.modules is not None and not {"qk", "vo"} <= set(self.modules)):
            raise OptionError(
                f"head_dim {self.head_dim} is the width of queries, keys and values, got modules "
                f"{','.join(self.modules or ())}; name qk and vo among them, without sparsities, or leave modules out"
            )
        if self.exclude_blocks:
            raise OptionError(
                f"head_dim {self.head_dim} is of all blocks, got exclude_blocks {self.exclude_blocks}; drop one"
            )
        if self.selection_qk == "norm":
            raise OptionError("head_dim chooses pairs by the error of the scores, got selection_qk=norm; drop one")

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        reasons = {}
        experts = architecture.experts
        if architecture.mlp is None and not (experts and experts.shared):
            what = "an MLP that all tokens go through" if experts else "an MLP that a spec can say"
            reasons["mlp"] = f"it does not have {what}"
        if experts is None:
            reasons["experts"] = "it has none"
        if architecture.attention.unsupported_reason:
            reasons |= dict.fromkeys(("qk", "vo"), architecture.attention.unsupported_reason)
        elif view.attention.norms and not view.attention.head_norms:
            reasons["qk"] = "it normalises queries and keys by more than their mean square, which needs all dimensions"
        for module in self.modules or ():
            if module in reasons:
                allowed = tuple(m for m in self.all_modules if m not in reasons)
                raise UnsupportedModelError(
                    f"{architecture.model_type} cannot take module {module!r}: {reasons[module]}; use "
                    f"{method_option('modules', allowed)}"
                )
        wanted = self.modules if self.modules is not None else self.all_modules
        if self.modules is None and view.attention.norms:  # it pays only where much goes, and no stock model can do it
            wanted = [module for module in wanted if module != "qk"]
        missing = {name for name in ("mlp", "experts") if getattr(view, name) is None}  # blocks may differ in kind
        missing |= {"qk", "vo"} if view.attention.spec.unsupported_reason else set()
        return tuple(m for m in self.all_modules if m in wanted and m not in reasons.keys() | missing)

    def statistics(self, view: BlockView) -> set[str]:
        needed = self._statistics_of_modules(view)
        return set().union(*(needed[m] for m in self.supported_modules(view.architecture, view)))

    def gradients(self, view: BlockView) -> set[str]:
        names = {"mlp": MLP_GRADIENT, "vo": ATTENTION_GRADIENT}
        wanted = self.supported_modules(view.architecture, view) if self.output_weighting == "fisher" else ()
        return {names[module] for module in wanted if module in names}

    def _statistics_of_modules(self, view: BlockView) -> dict[str, set[str]]:
        chosen = {"query", "key", "query_key"} | (set(SQUARES) if view.attention.norms else set())
        return {
            "mlp": {"mlp_hidden"},
            "experts": EXPERT_STATISTICS,
            "qk": {"query", "key_spread"} if is_free(self, view.attention) else chosen,
            "vo": {"value"},
        }

    def shared(self, view: BlockView) -> set[str]:
        return {"query_key"} if self.head_dim and view.attention.rotary_dim else set()

    def sum_up(self, blocks: Iterable[BlockMoments]) -> BlockMoments:
        costs = [relative_cost(moments["query_key"].second) for moments in blocks if "query_key" in moments]
        return {OF_MODEL: Moment(1.0, second=reduce(add, costs))} if self.head_dim and costs else {}

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        modules, attention = self.supported_modules(view.architecture, view), view.attention
        width = view.width
        projections = {"qk": attention.heads + attention.kv_heads, "vo": attention.heads + attention.kv_heads}
        units = []
        for module in modules:
            if module == "mlp":
                step, full = self.rank_multiple, view.mlp.hidden
                per_rank = width + sum(p.weight.numel() for p in view.mlp.rising().values()) // full
            elif module == "experts":
                step, full = math.lcm(self.rank_multiple, EXPERT_STEP), view.experts.hidden
                per_rank = view.experts.per_unit * view.experts.count
            else:
                full, per_rank = attention.head_dim, projections[module] * width
                whole_pairs = 2 if module == "qk" and self.rank_multiple % 2 else 1
                step = self.rank_multiple * whole_pairs
            chosen = self.head_dim if module in ("qk", "vo") else 0
            ranks = (chosen, full) if chosen else (*range(step, full, step), full)
            units.append(
                PrunableModule(view.index, module, ranks, tuple(r * per_rank for r in ranks), fixed=bool(chosen))
            )
        if self.head_dim:
            self._check_heads(view, modules)
        return units

    def _check_heads(self, view: BlockView, modules: tuple[str, ...]) -> None:
        """Raise unless all of the attention can have narrower heads."""
        if not {"qk", "vo"} <= set(modules):
            raise UnsupportedModelError(
                f"head_dim {self.head_dim} is the width of queries, keys and values, and "
                f"{view.architecture.model_type} gives {','.join(modules) or 'none'} only; leave head_dim out"
            )
        if self.head_dim >= view.attention.head_dim:
            raise OptionError(f"head_dim must be below the model's {view.attention.head_dim}, got {self.head_dim}")

    def truncated(self, view: BlockView, ranks: dict[str, int]) -> BlockResult:
        result = BlockResult()
        if "mlp" in ranks:
            truncate_mlp(view, ranks["mlp"], result)
        if "experts" in ranks:
            truncate_experts(view, ranks["experts"], result)
        if ranks.keys() & {"qk", "vo"}:
            truncate_attention(view.attention, ranks, result)
        return result

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        sizes = {u.module: u for u in self.prunable_modules(view)}
        change = sum(sizes[m].size(rank) - sizes[m].dense for m, rank in ranks.items())
        if "mlp" in ranks:
            lost = view.mlp.hidden - ranks["mlp"]
            biases = sum(p.bias.numel() for p in view.mlp.rising().values() if p.bias is not None)
            change -= lost * biases // view.mlp.hidden
        if "experts" in ranks:
            change -= view.experts.biases_per_unit * view.experts.count * (view.experts.hidden - ranks["experts"])
        biases, indices = self._attention_extras(view, ranks) if ranks.keys() & {"qk", "vo"} else (0, 0)
        return change - biases, indices

    def _attention_extras(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        """Biases that attention loses, less what its norms gain, and bytes of indices it gains."""
        attention, lost, indices = view.attention, 0, 0
        full = attention.head_dim
        qk, vo = ranks.get("qk", full), ranks.get("vo", full)
        q, k, v = attention.qkv()
        lost += sum((full - qk) * d.bias.numel() // full for d in (q, k) if d.bias is not None)
        if v.bias is not None and vo < full:
            lost += v.bias.numel() if values_move(self, attention) else (full - vo) * v.bias.numel() // full
        if 0 < qk < full and attention.norms:
            lost -= norm_parameters(attention, qk)
        if qk < full and attention.rotary_dim:
            indices = 4 * attention.kv_heads * qk // 2
        return lost, indices

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        attention, full = view.attention, view.attention.head_dim
        qk, vo = ranks.get("qk", full), ranks.get("vo", full)
        counter = ranks.get("vo") == 0  # of an attention that is gone; others have none from the beginning
        return attention.cached - attention.kv_heads * (2 * full - qk - vo) + counter

    def curve(self, view: BlockView, moments, unit: PrunableModule, least: int) -> Curve:
        return squared_errors(self, view, moments, unit, least)

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        found, width = Work(), view.width
        if 0 < ranks.get("mlp", 0) < (full := view.mlp.hidden if view.mlp else 0):
            found += self._work_of_units(full, width, ranks["mlp"])
        if 0 < ranks.get("experts", 0) < (full := view.experts.hidden if view.experts else 0):
            found += times(self._work_of_units(full, width, ranks["experts"]), view.experts.count)
        if 0 < ranks.get("vo", 0) < view.attention.head_dim:
            found += self._work_of_values(view)
        return found

    def _work_of_units(self, full: int, width: int, rank: int) -> Work:
        chosen = eliminating(full, width, rank) if self.selection == "obs" else Work()
        return inverting(full) + chosen + refitting(full, width, rank)

    def _work_of_values(self, view: BlockView) -> Work:
        """Count one decomposition of the values of all heads."""
        attention, width = view.attention, view.width
        N, K = attention.head_dim, attention.kv_heads
        return Work({("eigh", N): 2.0 * K, ("svd", N): float(K)}) + multiplying(4 * attention.heads * N, N, width)

    def work_of_curve(self, view: BlockView, unit: PrunableModule, least: int) -> Work:
        width, full = view.width, unit.ranks[-1]
        if unit.module in ("mlp", "experts"):
            one = comparing_ranks(full, width, least)
            return one if unit.module == "mlp" else times(one, view.experts.count)
        return self._work_of_values(view) if unit.module == "vo" else Work()

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """One step, in a piece for the MLP, the experts and attention."""
        needed, pieces = self._statistics_of_modules(view), []
        for names in (("mlp",), ("experts",), ("qk", "vo")):
            if mine := {module: ranks[module] for module in names if module in ranks}:
                statistics = set().union(*(needed[module] for module in mine))
                pieces.append(self._step(statistics, mine, is_shared="experts" in mine))
        (step,) = super().stages(view, ranks)
        return [step._replace(pieces=tuple(pieces))]

    def decompose(self, view: BlockView, moments, ranks: dict[str, int], each: Each = map) -> BlockResult:
        result = BlockResult()
        if "mlp" in ranks:
            reduce_mlp(self, view, view.mlp.down, moments, ranks["mlp"], result)
        if "experts" in ranks:
            reduce_experts(self, view, moments, ranks["experts"], result, each)
        if ranks.keys() & {"qk", "vo"}:
            compress_attention(self, view, moments, ranks, result)
        return result
