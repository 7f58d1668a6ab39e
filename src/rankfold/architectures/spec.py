"""What a model family looks like: data only, one :class:`Architecture` per ``model_type``.

Every trait is here because some step of the compression reads it, and the comment says which.
"""

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T", covariant=True)
LLAMA_4_GROWTH = ("llama_4_scaling_beta", "original_max_position_embeddings")
QKVLayout = Literal["split", "concat", "grouped"]
Position = Literal["rope", "alibi", "none"]


@dataclass(frozen=True)
class ByConfig(Generic[T]):
    """A trait that a field of the config decides: whether it is this value, or whether it is set."""

    field: str
    yes: T
    no: T
    value: Any = None

    def of(self, config: Any) -> T:
        """The trait of this model."""
        found = getattr(config, self.field)
        return self.yes if (found if self.value is None else found == self.value) else self.no


@dataclass(frozen=True)
class AttentionSpec:
    """Where the attention of a block keeps its projections. Paths are relative to the attention module."""

    path: str  # the module that is replaced, relative to the block; empty where that has no attention
    output: str
    qkv: tuple[str, ...]  # ("q_proj", "k_proj", "v_proj"), or the one fused projection; none where they are none such
    # split: three projections. concat: rows are [all q | all k | all v]. grouped: rows are, for every key head,
    # [its q heads | k | v]; with one query head each this is what GPT-NeoX and BLOOM call interleaved.
    layout: QKVLayout = "split"
    kv_heads: str | None = "config.num_key_value_heads"  # None: as many as query heads
    # rope: queries and keys are rotated in pairs, so type II may only select pairs. alibi: a bias on the scores is
    # passed in and must still be added. none: nothing sits between queries and keys, so they may be rotated freely
    # (SVD).
    position: Position | ByConfig[Position] = "rope"
    # Which dimensions rotary embedding turns together: p and p + half (GPT-NeoX), or 2 p and 2 p + 1 (GPT-J).
    rope_style: Literal["neox", "gptj"] = "neox"
    # Whether the model's cos/sin table says every angle twice in a row instead of repeating itself.
    interleaved_table: bool = False
    # Base of the angles, where the module makes them itself out of position numbers; None: it is handed tables of them.
    rotary_base: float | None = None
    # Attribute of the module that says whether this very layer rotates; None: all do. Queries and keys of a layer that
    # does not may be rotated freely.
    applies_rope: str | ByConfig[str | None] | None = None
    # Norms between projection and rotation: dropping dimensions changes the mean square they divide by, which then has
    # to be predicted from those that are left.
    qk_norm: tuple[str, str] | None = None
    norm_over: Literal["head", "all heads"] = "head"
    # What these norms add to their weight to get the scale; None: they subtract a mean, or it is not known what they
    # do, and the query-key pair stays dense.
    norm_offset: float | None = 0.0
    # Field of the config for the width of a head, so that a stock model may have narrower or fewer heads; None: the
    # class divides the model width by the number of heads.
    width: str | None = "head_dim"
    # Whether that config takes LongRoPE, a factor for every rotary pair, with heads of any width.
    longrope: bool = True
    # Where the module itself masks what is further back than a window: its attribute that is "local" in such a layer,
    # and the field of the config for the window; None: it is handed all there is to mask.
    window: tuple[str, str] | None = None
    # Fields of `rope_parameters`: the factor b and the positions n of a step, of queries that grow with their position
    # p, by 1 + b log(1 + floor(p / n)), so that attention to a long text stays sharp; None: they do not.
    growth: tuple[str, str] | None = None
    # Attribute with a learned score per query head that stands in the softmax beside those of the keys (an attention
    # sink): then a shift of all scores of a query counts too. None: there is none.
    sinks: str | None = None
    # What it computes that a compressed attention cannot, so that it stays as it is; None: nothing.
    unsupported_reason: str | None = None
    # The numbers it caches per token; fields of the config that add up to them; or the layer that makes the keys, which
    # blocks lack that read those of others; None: keys and values of all heads.
    cached: int | tuple[str, ...] | str | None = None
    # Attribute with the softmax scale, or the scale; None: the root of the head dimension divides. The compressed
    # module keeps this number.
    scaling: str | float | None = "scaling"
    dropout: str = "attention_dropout"
    output_dropout: str | None = None
    # The output projection is not in the attention module, and its path is relative to the block: so it is in BERT.
    outside: bool = False
    # The patches of all images stand in one sequence without a batch dimension, and the block is told where each
    # begins: so Qwen-VL's towers take images of any size.
    packed: bool = False

    @property
    def is_there(self) -> bool:
        """Whether this is an attention, or something in its place."""
        return bool(self.path)

    def is_in(self, block: "nn.Module") -> bool:
        """Tell whether a block has the layer that sends what this computes."""
        return part_at(block, self.output if self.outside else f"{self.path}.{self.output}") is not None


def part_at(block: "nn.Module", path: str) -> Any:
    """Return a module in a block; ``None`` where there is none, as blocks of a family may differ in kind."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), block)


def left_dense(attention: AttentionSpec, reason: str) -> AttentionSpec:
    """Return the spec of an attention of which no more is said than where it is, so that it stays as it is."""
    return AttentionSpec(
        attention.path, attention.output, (), kv_heads=attention.kv_heads, unsupported_reason=reason, width=None
    )


def mixer(path: str, reason: str) -> AttentionSpec:
    """Return the spec of what a block has in place of attention: it stays as it is and caches nothing per token."""
    return AttentionSpec(
        path, "out_proj", (), kv_heads=None, position="none", unsupported_reason=reason, cached=(), width=None
    )


def no_attention(output: str, *, packed: bool = False) -> AttentionSpec:
    """Return the spec of the attention of a block that has none, only ``output``, a layer that sends to the stream."""
    return AttentionSpec(
        path="",
        output=output,
        qkv=(),
        outside=True,
        kv_heads=None,
        position="none",
        unsupported_reason="it has no attention",
        cached=(),
        width=None,
        scaling=1.0,
        packed=packed,
    )


@dataclass(frozen=True)
class MLPSpec:
    """Where a block keeps its MLP. Paths are relative to the block; all of them lose or keep the same hidden units."""

    down: str
    up: str
    gate: str | None = None
    fused_gate: bool = False  # `up` holds [gate; up] stacked in its rows
    # Field of the config for the hidden units; None: the class fixes their number.
    width: str | None = "intermediate_size"
    # Between them: a block whose stream changes its width calls the layers itself. None: not said, and no such block
    # can be.
    activation: str | None = None

    @property
    def paths(self) -> dict[str, str]:
        """Paths of its linear layers: ``gate``, ``up`` (with the gate in it where that is fused) and ``down``."""
        found = {"gate": self.gate, "up": self.up, "down": self.down}
        return {name: path for name, path in found.items() if path}


@dataclass(frozen=True)
class ExpertsSpec:
    """Where a block keeps its experts: MLPs stacked in the 3-D parameters ``gate_up_proj`` and ``down_proj``, or
    ``up_proj`` and ``down_proj`` where they have no gate."""

    path: str = "mlp.experts"  # relative to the block; a block without it has an ordinary MLP
    transposed: bool = False  # stored (experts, in, out), as transformers' kernels want it; else (experts, out, in)
    interleaved: bool = False  # rows of gate and up take turns; else all of gate come first
    shared: MLPSpec | None = None  # the MLP that every token goes through beside its experts
    # Field of the config for the hidden units of an expert; None: the class makes other widths of it too.
    width: str | None = "moe_intermediate_size"
    # Fields of the config for the experts of a block, empty where a model of the family has none, and for those that a
    # token is sent to.
    count: str = "num_local_experts"
    active: str = "num_experts_per_tok"
    # Fields for the groups that the router chooses first, and how many of these; None: it chooses among all experts.
    groups: tuple[str, str] | None = None
    router: str | None = None  # where it stands beside the experts in the block; None: one module holds both
    # The RMS norms that the outputs of the MLP beside them and of all experts together go through before they are added
    # to each other; None: no such norms.
    norms_after: tuple[str, str] | None = None

    @property
    def owners(self) -> tuple[str, ...]:
        """Return the paths of the modules that hold the experts and their router."""
        return (self.router, self.path) if self.router else (self.path.rpartition(".")[0],)


@dataclass(frozen=True)
class NormsSpec:
    """The norms whose outputs attention and MLP read. Slicing the stream folds their numbers into the readers."""

    attention: tuple[str, ...] = ("input_layernorm",)  # the first of these names that the block has
    mlp: tuple[str, ...] = ("post_attention_layernorm",)
    is_layernorm: bool = False  # whether they subtract the mean; else RMSNorms
    offset: float = 0.0  # what they add to their weight to get the scale


@dataclass(frozen=True)
class Architecture:
    """One model family, selected by ``config.model_type``."""

    model_type: str
    blocks: str  # path of the list of decoder blocks; of a projector, which is one block, its own
    attention: AttentionSpec
    # Of the blocks without experts; None: there are none, or the MLP is nothing that a spec can say.
    mlp: MLPSpec | None
    experts: ExpertsSpec | None = None  # of the blocks that have them
    # What some blocks have in place of attention: linear attention, a convolution, nothing; or the attention itself
    # where something of that kind stands beside it. Its output projection tells it from others.
    mixers: tuple[AttentionSpec, ...] = ()
    # The module whose input is the residual stream between attention and MLP; None in a parallel block, where both read
    # the block's input, and in a block of one of them. The per-module influence score (MoDeGPT Eq. 42) needs that
    # point.
    middle: str | ByConfig[str | None] | None = "post_attention_layernorm"
    # Whether attention and MLP add their outputs to the residual stream as they are, with no norm or factor after
    # them. Only then can an output projection be fitted to what is missing from the stream.
    is_plain_residual: bool | ByConfig[bool] = True
    # The RMS norms that the outputs of attention and of the MLP go through before they are added; None: no such norms.
    norms_after: tuple[str, str] | None = None
    norms: NormsSpec | None = None  # None: not said, and the stream of such a family cannot be sliced
    # Whether the model predicts the next token of a text. What an encoder is for is not known, so its hidden states
    # after the last block are looked at in place of predictions.
    decoder: bool = True
    # Whether this is one block that makes another stream of what it receives, instead of adding to it.
    is_projector: bool = False
    # Whether the model is lost in a window that does not begin with its start token.
    needs_start: bool = False
    # Field of the config for the numbers of each token that every block is handed beside the stream. These, and keys
    # and values that later blocks read, are in memory for all calibration tokens.
    handed: str | None = None
    # Whether images are added to the stream after some blocks, which their numbers name, too.
    images_after_blocks: bool = False
    # Whether positions are counted from after the number of the padding token, as in RoBERTa: so many fewer can be
    # used.
    positions_after_padding: bool = False
    returns_tuple: bool = False  # the block returns (hidden, weights of attention) instead of the hidden states
    derived: bool = False  # read off a block, and not yet proved on the model (rankfold.compression.validate_spec)
    # Of every block the numbers that it caches per token, as a proof has found them; None: as its attention says.
    cached: tuple[int, ...] | None = None
    # (field of the config, or of a part of it; what it does where set that no spec can say)
    unless: tuple[tuple[str, str], ...] = ()

    def attention_of(self, block: "nn.Module") -> AttentionSpec:
        """Spec of the attention of a block, or of what it has in its place."""
        return next((spec for spec in self.mixers if spec.is_in(block)), self.attention)

    def path_of(self, index: int) -> str:
        """Path of a block."""
        return self.blocks if self.is_projector else f"{self.blocks}.{index}"
