"""How a projection is stored at a rank: how many numbers, how many bytes, and the description the runtime builds from.

The plan counts with it and the decomposition stores by it, so that what is planned is what is stored.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...architectures import BlockView, Dense
from ...errors import UnsupportedModelError
from ...linalg.junction import stored_numbers
from ...modules import build

if TYPE_CHECKING:
    from .method import LatentLLM

PLAIN = ("left", "right", "symmetric")  # junctions that store both factors in full
FISHER = "fisher"  # the pre-conditioner of the Fisher of columns, and the statistic it reads of every layer
EXPERTS = ("experts_up", "experts_down")  # gate and up of all experts, and their down projections
QKV = "qkv"  # the unit that takes the place of q, k and v where they share a latent
# Module -> the statistic of its input, in the order in which a block computes them.
INPUTS = dict.fromkeys(("q", "k", "v", QKV), "attention_input") | {"o": "attention_output"}
INPUTS |= {"gate": "mlp_input", "up": "mlp_input", "down": "mlp_hidden"}


@dataclass(frozen=True)
class Slot:
    """One projection that may become latent, and the options that decide how it is stored."""

    method: "LatentLLM"
    name: str
    out: int
    wide: int
    bias: bool  # of the latent projection
    gains: bool  # whether the dense one has none
    heads: int  # heads its outputs come in; of query, key and value projections
    copies: int = 1  # experts that have such a projection
    head_identity: bool = False  # whether every head of ``B`` has an identity block (Eq. 79-80, 187-188)

    @property
    def split(self) -> bool:
        """Whether every head has a low rank of its own (App. D); the rank is then that of a head."""
        return self.method.split_head and self.name in ("q", "k", "v")

    @property
    def alone(self) -> bool:
        """Whether it is sparse and nothing else (App. I); the rank is then the mean number of values of an output."""
        return self.method.sparse == 1

    @property
    def head_dim(self) -> int:
        return self.out // self.heads

    @property
    def full(self) -> int:
        """The rank that stands for the dense projection."""
        return self.wide if self.alone else min(self.head_dim if self.split else self.out, self.wide)

    @property
    def dense(self) -> int:
        return self.out * self.wide

    def factors(self, rank: int) -> int:
        """Numbers in ``A`` and ``B``; a bias is not counted."""
        if self.alone:
            return 0
        if self.split:
            return self.heads * stored_numbers(self.method.junction, self.head_dim, self.wide, rank)
        saved = self.heads * self.head_dim**2 if self.head_identity else 0
        return stored_numbers(self.method.junction, self.out, self.wide, rank) - saved

    def nonzeros(self, rank: int) -> int:
        """Values of the sparse part: the method's share of all numbers."""
        if self.alone:
            return rank * self.out
        share = self.method.sparse
        return int(self.factors(rank) * share / (1 - share))

    def numbers(self, rank: int) -> int:
        """All weights stored."""
        return self.factors(rank) + self.nonzeros(rank)

    def ladder(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks to choose from and weights at each, ascending; the last one leaves the projection dense."""
        least = self.head_dim if self.head_identity else 1
        steps = [r for r in range(self.method.rank_multiple, self.full, self.method.rank_multiple) if r >= least]
        steps = [r for r in steps if self.numbers(r) < self.dense]
        sizes = (*map(self.numbers, steps), self.dense)
        return (*steps, self.full), tuple(self.copies * size for size in sizes)

    def spec(self, rank: int) -> dict:
        """The description of the runtime module."""
        if self.alone:
            sizes = {"in": self.wide, "out": self.out, "nonzeros": self.nonzeros(rank)}
            return {"kind": "sparse", **sizes, "bias": self.bias}
        form = "plain" if self.method.junction in PLAIN else self.method.junction
        if form == "lu" and not self.method.bits:  # a code of both triangles could not be refined for one of them
            form = "triangles"
        spec = {"kind": "latent", "in": self.wide, "out": self.out, "rank": rank, "form": form, "bias": self.bias}
        if self.split:
            spec |= {"kind": "split_head", "heads": self.heads}
        if self.method.bits:
            spec |= {"bits": self.method.bits, "chunk": self.method.chunk}
        if self.head_identity:
            spec["head_identity"] = self.heads
        if self.nonzeros(rank):
            spec["nonzeros"] = self.nonzeros(rank)
        return spec

    def products(self, rank: int) -> int:
        """Matrix products that a token takes: of factors, of a square that holds two triangles, of the sparse part."""
        spec = self.spec(rank)
        if self.alone:
            return 1
        return 2 + (2 if spec["form"] == "triangles" else 0) + ("nonzeros" in spec)

    def storage(self, rank: int) -> tuple[int, int]:
        """``(numbers kept in the model's dtype, bytes of all else)``: codes and indices are bytes, scales are numbers.

        Counted on the module the runtime will build. A bias is not counted, as in :meth:`numbers`.
        """
        floats, other = _sizes_of(tuple(self.spec(rank).items()))
        return floats - self.out * self.bias, other


@functools.cache
def _sizes_of(spec: tuple[tuple[str, str | int], ...]) -> tuple[int, int]:
    """Return the floating-point numbers of a module, and the bytes of all its other tensors: layers of a size recur."""
    with torch.device("meta"):
        tensors = build(dict(spec)).state_dict().values()
    floats = sum(t.numel() for t in tensors if t.is_floating_point())
    return floats, sum(t.nbytes for t in tensors if not t.is_floating_point())


def dense_projections(method, view: BlockView) -> dict[str, Dense]:
    """Module -> projection, for all that this block has."""
    projections = dict[str, Dense]()
    if view.attention.spec.qkv:
        parts = dict(zip(("q", "k", "v"), view.attention.qkv(), strict=True))
        projections |= {QKV: _stack(view, *parts.values())} if method.shared_qkv else parts
        projections["o"] = view.attention.output
    if view.mlp:
        rising = view.mlp.rising()
        projections |= {"up": rising[view.mlp.spec.up], "down": view.mlp.down}
        if view.mlp.spec.gate:
            projections["gate"] = rising[view.mlp.spec.gate]
    return projections


def column_weights(method, view: BlockView, moments) -> dict[str, Tensor]:
    """Module -> ``(N,)`` Fisher of the columns of its weight, where they are weighed by it."""
    if method.precondition != FISHER:
        return {}
    found = {}
    for module in method.supported_modules(view.architecture, view):
        layer, index = stored_rows(view, module)
        found[module] = moments[f"{layer}_{FISHER}"].total.double()[index].sum(0)
    return found


def fishers(method, view: BlockView) -> set[str]:
    """Statistics of gradients that :func:`column_weights` reads."""
    if method.precondition != FISHER:
        return set()
    return {f"{stored_rows(view, module)[0]}_{FISHER}" for module in method.supported_modules(view.architecture, view)}


def stored_rows(view: BlockView, module: str):
    """Return the layer that holds a projection, and which of its rows."""
    return view.attention.qkv_rows().get(module, (module, slice(None)))


def slots(method, view: BlockView) -> dict[str, Slot]:
    """Module -> slot, for all that this block has."""
    heads = {"q": view.attention.heads, "k": view.attention.kv_heads, "v": view.attention.kv_heads}
    found, copies, identities = dense_projections(method, view), dict[str, int](), head_identities(method, view)
    if (experts := view.experts) and method.takes_experts:
        found |= zip(EXPERTS, (experts.rising(0), experts.down(0)), strict=True)
        copies.update(dict.fromkeys(EXPERTS, experts.count))

    def slot(name: str, dense: Dense) -> Slot:
        has, gets = dense.bias is not None, method.refits_bias(dense)
        out, wide = dense.weight.shape
        counts = heads.get(name, 1), copies.get(name, 1)
        return Slot(method, name, out, wide, has or gets, gets and not has, *counts, name in identities)

    return {name: slot(name, dense) for name, dense in found.items()}


def head_identities(method, view: BlockView) -> set[str]:
    """Return which of k and v get an identity in every head: of both factors of a pair that may lose weights.

    Keys get one only where nothing stands between them and the scores, as it would have to commute with that.
    """
    if not method.head_junction:
        return set()
    pairs = {"k": {"q", "k"}, "v": {"v", "o"}}
    if view.attention.rotary_dim or view.attention.norms:
        del pairs["k"]
    return {m for m, pair in pairs.items() if method.modules is None or pair <= set(method.modules)}


def _stack(view: BlockView, *parts: Dense) -> Dense:
    """``[W_q; W_k; W_v]`` (Eq. 50)."""
    biases = [p.bias for p in parts if p.bias is not None]
    if biases and len(biases) < len(parts):
        raise UnsupportedModelError(
            f"{view.architecture.model_type} has biases on some of q, k and v only; shared_qkv=true takes all or none"
        )
    return Dense(torch.cat([p.weight for p in parts]), torch.cat(biases) if biases else None)
