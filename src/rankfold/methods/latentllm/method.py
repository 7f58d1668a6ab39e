"""LatentLLM (arXiv:2505.18413): every linear layer through a latent, jointly where they act jointly.

Also the local methods it is compared with, as methods of their own: they differ in pre-conditioner and junction only.
"""

from dataclasses import dataclass
from typing import ClassVar

from ...architectures import BlockView, Dense
from ...errors import OptionError, UnsupportedModelError
from ...linalg.junction import JUNCTIONS, stored_numbers
from ...linalg.lowrank import PRECONDITIONERS
from ..base import BlockResult, Method, Unit, check_choice, register_method
from .attention import decompose_attention
from .mlp import decompose_mlp

__all__ = ["ASVD", "SVD", "SVDLLM", "LatentLLM", "RootCov"]

ATTENTION = ("q", "k", "v", "o")
JOINT = ("qk", "vo", "ud")


@register_method
@dataclass(frozen=True)
class LatentLLM(Method):
    """Options of the latent methods beside those of every method. Modules: q, k, v, o, gate, up, down.

    Attributes:
        precondition: ``rootcov`` (optimal), ``identity``, ``hessian``, ``l1``, ``l2`` or ``covariance`` (Table 1).
        junction: ``block_identity_right``, ``block_identity_left``, ``lu`` (these store ``R (O + N) - R^2`` numbers),
            ``left``, ``right`` or ``symmetric`` (plain factors).
        joint: which pairs are decomposed together, comma-separated: ``qk`` (Sec. 4.1), ``vo`` (Sec. 4.2; the paper found
            split better), ``ud`` (Sec. 4.3; ReLU without gate). A pair that the architecture cannot take this way is
            decomposed locally unless it was asked for by name here, and the record says so.
        alternations: of the joint query-key and value-output forms.
        window: offsets of the rotary-aware joint query-key form (App. F.3), 0 for none.
        rounds: of the joint up-down form.
        ridge: relative damping of the moments.
        alpha: exponent of ``l1``.
        bias_refit: let biases take the mean (App. B.2).
        condition_limit: largest condition number of the block a junction inverts.
        latent_cache: cache latents instead of heads where that is smaller and still correct.
    """

    name: ClassVar[str] = "latentllm"
    all_modules: ClassVar[tuple[str, ...]] = (*ATTENTION, "gate", "up", "down")

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

    def __post_init__(self):
        super().__post_init__()
        check_choice("precondition", self.precondition, PRECONDITIONERS)
        check_choice("junction", self.junction, JUNCTIONS)
        for pair in self.joint_asked:
            check_choice("joint", pair, JOINT)
        for key in ("alternations",):
            if getattr(self, key) < 1:
                raise OptionError(f"{key} must be >= 1, got {getattr(self, key)}")
        for key in ("window", "rounds", "ridge"):
            if getattr(self, key) < 0:
                raise OptionError(f"{key} must be >= 0, got {getattr(self, key)}")

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
        if view.mlp is None or view.mlp.spec.gate or view.mlp.spec.fused_gate:
            reasons["ud"] = "the closed form of App. H is for an MLP without gate"
        elif not _is_relu(view.config):
            reasons["ud"] = "the closed form of App. H is for ReLU"
        for pair in self.joint_asked:
            if pair in reasons:
                raise UnsupportedModelError(
                    f"{view.architecture.model_type} cannot take the joint form {pair!r}: {reasons[pair]}; use joint=auto"
                )
        wanted = {"qk", "ud"} if self.joint == "auto" else set(self.joint_asked)
        return wanted - reasons.keys()

    def _projections(self, view: BlockView) -> dict[str, Dense]:
        """Module -> projection, for the modules this block has."""
        projections = dict(zip(("q", "k", "v"), view.attention.qkv(), strict=True)) | {"o": view.attention.output}
        if view.mlp:
            rising = view.mlp.rising()
            projections |= {"up": rising[view.mlp.spec.up], "down": view.mlp.down}
            if view.mlp.spec.gate:
                projections["gate"] = rising[view.mlp.spec.gate]
        return projections

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        present = [m for m in self.all_modules if m in ATTENTION or (architecture.mlp and _has(architecture.mlp, m))]
        for module in self.modules or ():
            if module not in present:
                raise UnsupportedModelError(
                    f"{architecture.model_type} has no module {module!r} that can be compressed; it has: {','.join(present)}"
                )
        self.joint_forms(view)
        wanted = self.modules if self.modules is not None else present
        return tuple(m for m in present if m in wanted)

    def statistics(self, view: BlockView) -> set[str]:
        needed = dict.fromkeys(("q", "k", "v"), "attention_input") | {"o": "attention_output", "down": "mlp_hidden"}
        modules = self.supported_modules(view.architecture, view)
        names = {needed.get(m, "mlp_input") for m in modules} | ({"absolute"} if self.precondition == "l1" else set())
        return names | ({"mlp_samples"} if "ud" in self.joint_forms(view) and {"up", "down"} <= set(modules) else set())

    def units(self, view: BlockView) -> list[Unit]:
        projections, units = self._projections(view), []
        for module in self.supported_modules(view.architecture, view):
            out, wide = projections[module].weight.shape
            full = min(out, wide)
            steps = [r for r in range(self.multiple, full, self.multiple) if self._size(out, wide, r) < out * wide]
            sizes = [self._size(out, wide, r) for r in steps]
            units.append(Unit(view.index, module, (*steps, full), (*sizes, out * wide)))
        return units

    def _size(self, out: int, wide: int, rank: int) -> int:
        return stored_numbers(self.junction, out, wide, rank)

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        units, projections = {u.module: u for u in self.units(view)}, self._projections(view)
        change = sum(units[m].size(rank) - units[m].dense for m, rank in ranks.items())
        wide = {"block_identity_right": (0, 1), "block_identity_left": (1, 0), "lu": (1, 1)}.get(self.junction, (0, 0))
        indices = 0
        for module, rank in ranks.items():
            out, inputs = projections[module].weight.shape
            if rank < units[module].ranks[-1]:
                indices += 4 * (wide[0] * out + wide[1] * inputs)
        return change, indices

    def cached_latents(self, view: BlockView, ranks: dict[str, int]) -> str:
        """Which of k and v cache latents: where the latent is narrower than all heads together, and, for keys, where no
        rotary embedding or norm stands between latent and score."""
        if not self.latent_cache:
            return ""
        attention = view.attention
        width = attention.kv_heads * attention.head_dim
        free = {"v": True, "k": not attention.rotary_dim and not attention.norms}
        full = {m: min(p.weight.shape) for m, p in self._projections(view).items()}
        return "".join(m for m in "kv" if free[m] and m in ranks and ranks[m] < min(width, full[m]))

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        cached = self.cached_latents(view, ranks)
        width = view.attention.kv_heads * view.attention.head_dim
        return sum(ranks[m] if m in cached else width for m in "kv")

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        result = BlockResult({}, {}, {})
        dense = {u.module: u.ranks[-1] for u in self.units(view)}
        lower = {m: r for m, r in ranks.items() if r < dense[m]}
        joint = self.joint_forms(view)
        attention = {m: r for m, r in lower.items() if m in ATTENTION}
        mlp = {m: r for m, r in lower.items() if m not in ATTENTION}
        if attention:
            decompose_attention(self, view, moments, attention, joint, self.cached_latents(view, ranks), result)
        if mlp:
            decompose_mlp(self, view, moments, mlp, joint, result)
        for module in ranks.keys() - lower.keys():
            result.reports[module] = {"rank": dense[module], "of": dense[module], "relative_error": 0.0}
        return result


def _has(mlp, module: str) -> bool:
    return module in ("up", "down") or (module == "gate" and mlp.gate is not None)


def _is_relu(config) -> bool:
    return any(getattr(config, key, None) == "relu" for key in ("activation_function", "hidden_act", "activation"))


@register_method
@dataclass(frozen=True)
class RootCov(LatentLLM):
    """Local low rank by root covariance, with block identity: LatentLLM without its joint forms."""

    name: ClassVar[str] = "rootcov"
    joint: str = "none"


@register_method
@dataclass(frozen=True)
class SVDLLM(RootCov):
    """Root covariance by whitening, plain factors: what SVD-LLM (arXiv:2403.07378) does before its update step."""

    name: ClassVar[str] = "svd-llm"
    junction: str = "symmetric"


@register_method
@dataclass(frozen=True)
class ASVD(SVDLLM):
    """Diagonal pre-conditioning by mean absolute activations to the power alpha: ASVD (arXiv:2312.05821)."""

    name: ClassVar[str] = "asvd"
    precondition: str = "l1"


@register_method
@dataclass(frozen=True)
class SVD(SVDLLM):
    """Plain SVD of the weights."""

    name: ClassVar[str] = "svd"
    precondition: str = "identity"
