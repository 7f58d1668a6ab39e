"""LatentLLM (arXiv:2505.18413): every linear layer through a latent, jointly where they act jointly."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..._utils.memory import release_memory
from ..._utils.processes import Each
from ...architectures import BlockView, Dense
from ...calibration.experts import STATISTICS
from ...calibration.statistics import SAMPLE_ROWS
from ...errors import UnsupportedModelError
from ..base import BlockResult, CompressionStep, NarrowingMethod, PrunableModule
from ..work import Work, multiplying, passing, times
from .attention import ATTENTION, decompose_attention
from .experts import decompose_experts
from .layout import EXPERTS, FISHER, INPUTS, QKV, dense_projections, fishers, head_identities, slots
from .mlp import decompose_mlp
from .options import COARSE, ROUNDED_BADLY, check_options
from .report import Report


@dataclass(frozen=True)
class LatentLLM(NarrowingMethod):
    """Options of the latent methods beside those of every method. Modules: q, k, v, o, gate, up, down; and of experts
    experts_up (gate and up of each as one) and experts_down.

    Attributes:
        precondition: ``rootcov`` (optimal), ``identity``, ``hessian``, ``l1``, ``l2`` or ``covariance`` (Table 1); or
            ``fisher``: every column by its empirical Fisher, from one backward pass (FWSVD); all forms are then local.
        junction: ``block_identity_right``, ``block_identity_left``, ``lu`` (these store ``R (O + N) - R^2`` numbers),
            ``left``, ``right`` or ``symmetric`` (plain factors).
        joint: which pairs are decomposed together, comma-separated: ``qk`` (Sec. 4.1), ``vo`` (Sec. 4.2; no
            better than split in the paper), ``ud`` (Sec. 4.3; ReLU without gate). A pair that the architecture cannot
            take this way is decomposed locally unless it was asked for by name here, and the record says so.
        alternations: of the joint query-key and value-output forms.
        window: offsets of the rotary-aware joint query-key form (App. F.3), 0 for none.
        rounds: of the joint up-down form.
        ridge: relative damping of the moments.
        alpha: exponent of ``l1``.
        bias_refit: let biases take the mean (App. B.2); without, pairs that have some are decomposed locally, as joint
            forms move them.
        condition_limit: largest condition number of the block a junction inverts.
        latent_cache: cache latents instead of heads where that is smaller and still correct.
        bits: of the stored factors, 2 to 8, in chunks of ``chunk`` numbers (App. I.1); 0 keeps the model's dtype.
            Factors are refined under rounding in every junction and form; identities and other fixed entries stay
            exact. Sparse values, biases and dense modules stay. To 4 bits ``lu`` and ``block_identity_left`` lose most,
            and the plan says so.
        chunk: numbers that share a scale and a smallest value.
        sparse: share of a module's kept weights that are single values of a sparse matrix (App. I), in [0, 1]; the low
            rank has the rest. With 1 there is none, and a rank is the mean number of values for each output. All forms
            are then local, and heads are cached: a sparse matrix has no latent.
        shrink: how its entries are chosen: ``hard``, ``soft``, ``ste`` or ``diagonal``.
        shared_qkv: one latent for queries, keys and values (App. C), as unit ``qkv`` in place of ``q``, ``k``, ``v``.
        split_head: a low rank of its own for every head of ``q``, ``k``, ``v`` (App. D), the rank being a head's.
        head_junction: an identity in every value head (Eq. 187-188), and in every key head that nothing rotates or
            normalises (Eq. 79-80): ``K h^2`` numbers less of each.
        attention_aware: with ``joint=vo``, refit the output side to what attention sends into it (App. G.2).
        qk_ranks: ``plan``, or ``spectra``: in the joint form both ranks are chosen anew within what was planned for q
            and k together (App. E), once the spectra are known, where that lowers the error. The plan is then an upper
            bound; the record has the ranks.
    """

    name: ClassVar[str] = "latentllm"
    workspace: ClassVar[tuple[float, float]] = (2.0, 1.5)  # a factor, and what it is made of
    all_modules: ClassVar[tuple[str, ...]] = (*ATTENTION, "gate", "up", "down", *EXPERTS)
    targets: ClassVar[tuple[str, ...]] = ("transformers", "vllm")
    # Whether what a layer sends is fitted about its means, with a bias for every layer.
    features: ClassVar[bool] = False

    precondition: str = "rootcov"
    junction: str = "block_identity_right"
    joint: str = "auto"
    alternations: int = 8
    window: int = 5
    rounds: int = 4
    ridge: float = 1e-4
    alpha: float = 0.5
    bias_refit: bool = True
    condition_limit: float = 1e8
    latent_cache: bool = True
    bits: int = 0
    chunk: int = 64
    sparse: float = 0.0
    shrink: str = "hard"
    shared_qkv: bool = False
    split_head: bool = False
    head_junction: bool = False
    attention_aware: bool = False
    qk_ranks: str = "plan"

    def __post_init__(self):
        super().__post_init__()
        check_options(self)

    @property
    def joint_asked(self) -> tuple[str, ...]:
        """Pairs asked for by name; empty for ``auto`` and ``none``."""
        return () if self.joint in ("auto", "none", "") else tuple(self.joint.split(","))

    def joint_forms(self, view: BlockView) -> set[str]:
        """Which pairs of this block are decomposed jointly.

        Raises:
            UnsupportedModelError: a pair asked for by name that the architecture cannot take.
        """
        reasons = {}
        if view.attention.norms:
            reasons["qk"] = "it normalises queries and keys, so their product is not the model's score"
        mlp = view.architecture.mlp if view.mlp is None else view.mlp.spec
        if mlp is None or mlp.gate or mlp.fused_gate:
            reasons["ud"] = "the closed form of App. H is for an MLP without gate"
        elif not view.relu:
            reasons["ud"] = "the closed form of App. H is for ReLU"
        for pair in () if self.bias_refit else self._biased_pairs(view):
            reasons.setdefault(pair, "its form moves the biases, which bias_refit=false keeps")
        for pair in self.joint_asked:
            if pair in reasons:
                raise UnsupportedModelError(
                    f"{view.architecture.model_type} cannot take the joint form {pair!r}: {reasons[pair]}; "
                    "use joint=auto"
                )
        moves = view.attention.averages and view.attention.output.bias is not None
        if self.attention_aware and view.attention.spec.qkv and view.attention.qkv()[2].bias is not None and not moves:
            why = "its output projection has none that could take up what of it is lost"
            raise UnsupportedModelError(
                f"{view.architecture.model_type} cannot take attention_aware=true: its values have a bias, and "
                f"{why if view.attention.averages else 'its sinks take some of it'}; leave it out"
            )
        wanted = (
            {"qk", "ud"}
            if self.joint == "auto" and not self.sparse and self.precondition != FISHER
            else set(self.joint_asked)
        )
        if self.shared_qkv or self.split_head:
            wanted -= {"qk"}
        return wanted - reasons.keys()

    def _biased_pairs(self, view: BlockView) -> set[str]:
        """Pairs whose joint form would move a bias, or leave out of its loss what one adds (App. E.2, G.1, H)."""
        dense = dense_projections(self, view)
        pairs = {"qk": "qk", "vo": "v", "ud": ("up", "down")}
        return {pair for pair, names in pairs.items() if any(m in dense and dense[m].bias is not None for m in names)}

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        there = slots(self, view)
        present = [m for m in self.all_modules if m in there]
        elsewhere = EXPERTS if architecture.experts and self.takes_experts else ()  # blocks may differ in kind
        if architecture.mixers and not architecture.attention.unsupported_reason:
            elsewhere += (QKV, "o") if self.shared_qkv else ("q", "k", "v", "o")
        elsewhere += tuple(architecture.mlp.paths) if architecture.mlp else ()
        for module in self.modules or ():
            if module not in (*present, *elsewhere):
                rest = ",".join(m for m in self.all_modules if m in (*present, *elsewhere))
                raise UnsupportedModelError(
                    f"{architecture.model_type} has no module {module!r} that can be compressed; it has: {rest}"
                )
        if self.head_junction and not head_identities(self, view):
            why = "normalises" if view.attention.norms else "rotates"
            raise UnsupportedModelError(
                f"{architecture.model_type} cannot take head_junction=true for q and k: it {why} queries and keys "
                "after their projections, and an identity in a head's keys mixes its dimensions; "
                "name v and o in modules, or leave it out"
            )
        self.joint_forms(view)
        wanted = self.modules if self.modules is not None else present
        return tuple(m for m in present if m in wanted)

    @property
    def caution(self) -> str:
        if not 0 < self.bits <= COARSE or self.junction not in ROUNDED_BADLY:
            return ""
        return (
            f"Codes of {self.bits} bits lose much more in junction={self.junction} than in any other; take "
            f"junction=block_identity_right or symmetric, or more bits."
        )

    @property
    def takes_experts(self) -> bool:
        """Whether what it reads is measured of experts."""
        return self.precondition not in (FISHER, "l1") and not self.features

    def refits_bias(self, dense: Dense) -> bool:
        """Whether the bias of a projection takes the mean of what is lost."""
        return self.bias_refit and (self.features or dense.bias is not None)

    def statistics(self, view: BlockView) -> set[str]:
        return self._statistics_of(view, self.supported_modules(view.architecture, view))

    def _statistics_of(self, view: BlockView, modules: Iterable[str]) -> set[str]:
        names = {INPUTS[m] for m in modules if m not in EXPERTS}
        names |= STATISTICS if set(modules) & set(EXPERTS) else set()
        names |= {"absolute"} if self.precondition == "l1" else set()
        names |= {"windows"} if self.features else set()
        return names | ({"mlp_samples"} if "ud" in self.joint_forms(view) and {"up", "down"} <= set(modules) else set())

    def gradients(self, view: BlockView) -> set[str]:
        return fishers(self, view)

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        modules = self.supported_modules(view.architecture, view)
        there = slots(self, view)
        return [PrunableModule(view.index, module, *there[module].ladder()) for module in modules]

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        lower = self._lower(view, ranks)
        change = sum(slot.copies * (slot.numbers(rank) - slot.dense + slot.gains * slot.out) for slot, rank in lower)
        return change, sum(slot.copies * slot.storage(rank)[1] for slot, rank in lower)

    def float_change(self, view: BlockView, ranks: dict[str, int]) -> int:
        return sum(
            slot.copies * (slot.storage(rank)[0] - slot.dense + slot.gains * slot.out)
            for slot, rank in self._lower(view, ranks)
        )

    def added_products(self, view: BlockView, ranks: dict[str, int]) -> int:
        met = view.experts.active if view.experts else 1  # experts that a token is sent to
        return sum(
            (met if slot.name in EXPERTS else 1) * (slot.products(rank) - (3 if slot.name == QKV else 1))
            for slot, rank in self._lower(view, ranks)
        )

    def _lower(self, view: BlockView, ranks: dict[str, int]):
        """Slot and rank of every module that does not stay dense."""
        there = slots(self, view)
        return [(there[module], rank) for module, rank in ranks.items() if rank < there[module].full]

    def cached_latents(self, view: BlockView, ranks: dict[str, int]) -> str:
        """Which of k and v cache latents: where the latent is narrower than all heads together, and, for keys, where no
        rotary embedding or norm stands between latent and score. A latent that all share is cached once."""
        if not self.latent_cache or self.sparse or self.split_head:
            return ""
        attention, there = view.attention, slots(self, view)
        width = attention.kv_heads * attention.head_dim
        free = "v" if attention.rotary_dim or attention.norms else "kv"
        if self.shared_qkv:
            latent = QKV in ranks and ranks[QKV] < min(len(free) * width, there[QKV].full)
            return free if latent else ""
        return "".join(m for m in free if m in ranks and ranks[m] < min(width, there[m].full))

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        if view.attention.spec.unsupported_reason:
            return view.attention.cached
        cached = self.cached_latents(view, ranks)
        width = view.attention.kv_heads * view.attention.head_dim
        if self.shared_qkv and cached:
            return ranks[QKV] + (2 - len(cached)) * width
        if self.qk_ranks == "spectra" and "qk" in self.joint_forms(view):
            cached = cached.replace("k", "")  # the latent of the keys may become as wide as their heads
        return sum(ranks[m] if m in cached else width for m in "kv")

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        """Of every input a root, of every layer the vectors of one side; joint pairs once more in every alternation."""
        found, joint = Work(), self.joint_forms(view)
        lower = [slot for slot, _ in self._lower(view, ranks)]
        for wide in {slot.wide for slot in lower if slot.copies == 1}:
            found += _root_work(self.precondition, wide)
        for slot in lower:
            side = min(slot.out, slot.wide)
            one = Work({("eigh", side): 1.0})
            one += times(multiplying(slot.out, slot.wide, slot.wide), 4)  # into the metric, the factors, the errors
            one += multiplying(side, side, max(slot.out, slot.wide)) + passing(slot.wide**2, 10)
            one = one if slot.copies == 1 else one + _root_work(self.precondition, slot.wide)
            found += times(one, slot.copies)
        width = view.width
        for pair, modules in (("qk", {"q", "k"}), ("vo", {"v", "o"})):
            if pair in joint and modules <= {slot.name for slot in lower}:
                rows = min(width, view.attention.heads * view.attention.head_dim)
                alternation = Work({("eigh", rows): 2.0}) + times(multiplying(rows, rows, width), 4)
                found += times(alternation, self.alternations)
        if "ud" in joint and {"up", "down"} <= {slot.name for slot in lower}:
            F = view.mlp.hidden
            found += times(times(multiplying(F, width, SAMPLE_ROWS * F), 4), self.rounds)
        return found

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """One step, in a piece for each group of modules; modules that stay dense are in the first one."""
        there, pieces = slots(self, view), []
        dense = {m: rank for m, rank in ranks.items() if rank >= there[m].full}
        for _, names in _groups(m for m in ranks if m not in dense):
            mine = ({} if pieces else dense) | {m: ranks[m] for m in names}
            pieces.append(self._step(self._statistics_of(view, names), mine, is_shared=names[0] in EXPERTS))
        (step,) = super().stages(view, ranks)
        return [step._replace(pieces=tuple(pieces))]

    def decompose(self, view: BlockView, moments, ranks: dict[str, int], each: Each = map) -> BlockResult:
        there = slots(self, view)
        lower = {m: r for m, r in ranks.items() if r < there[m].full}
        dense = {m: Report(there[m].full, there[m].full, "dense", 0.0).to_dict() for m in ranks if m not in lower}
        result = BlockResult(reports=dense)
        for decompose, names in _groups(lower, each):
            part = decompose(self, view, moments, {m: lower[m] for m in names})
            for kind in ("modules", "state", "reports", "errors"):
                getattr(result, kind).update(getattr(part, kind))
            release_memory()
        return result


def _groups(modules: Iterable[str], each: Each = map) -> list[tuple[Callable[..., BlockResult], list[str]]]:
    """Return what decomposes them, and modules that are decomposed together; those of two groups share no statistic."""
    names = list(modules)
    groups: list[tuple[Callable[..., BlockResult], list[str]]] = [
        (decompose_attention, [m for m in names if m in ATTENTION]),
        (decompose_mlp, [m for m in names if m not in (*ATTENTION, *EXPERTS)]),
        (partial(decompose_experts, each=each), [m for m in names if m in EXPERTS]),
    ]
    return [group for group in groups if group[1]]


def _root_work(kind: str, wide: int) -> Work:
    """Count the pre-conditioner of one input."""
    routine = {"rootcov": "cholesky", "covariance": "eigh", "hessian": "eigh"}.get(kind)
    return Work({(routine, wide): 1.0}) if routine else Work()
