"""One reading of a block's weights, whatever its family calls them and however it stores them.

Shape legend: D model width, F hidden width of the MLP.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .attention import AttentionView, read_attention
from .experts import ExpertsView, read_experts
from .linear import Dense, read_linear
from .norms import Norm, read_norm
from .spec import Architecture, ByConfig, MLPSpec, part_at

T = TypeVar("T")


@dataclass(frozen=True)
class MLPView:
    """The MLP of one block."""

    spec: MLPSpec
    block: nn.Module

    @property
    def down(self) -> Dense:
        """``(D, F)``."""
        return read_linear(self.block.get_submodule(self.spec.down))

    @property
    def hidden(self) -> int:
        return self.down.weight.shape[1]

    @property
    def paths(self) -> dict[str, str]:
        return self.spec.paths

    def rising(self) -> dict[str, Dense]:
        """Path -> projection into the hidden units: up, gate, or both stacked."""
        paths = [p for p in (self.spec.gate, self.spec.up) if p]
        return {p: read_linear(self.block.get_submodule(p)) for p in paths}

    def rows_of(self, keep: Tensor) -> Tensor:
        """Rows of every rising projection that belong to the hidden units ``keep``."""
        return torch.cat([keep, keep + self.hidden]) if self.spec.fused_gate else keep


@dataclass(frozen=True)
class BlockView:
    """One decoder block."""

    architecture: Architecture
    index: int
    module: nn.Module
    config: Any  # the text config
    inv_freq: Tensor | None = None  # (rotary_dim / 2,) angle per position of each rotary pair; None without
    # (D, r) orthonormal: coordinates that the block before writes in; None: the model's own.
    basis: Tensor | None = None

    @property
    def path(self) -> str:
        return self.architecture.path_of(self.index)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def on_cpu(self) -> "BlockView":
        """A copy on the CPU."""
        frequencies = None if self.inv_freq is None else self.inv_freq.cpu()
        return replace(self, module=copy.deepcopy(self.module).to("cpu"), inv_freq=frequencies)

    @property
    def width(self) -> int:
        """Numbers of a token in the residual stream, D."""
        return self.attention.output.weight.shape[0]

    @property
    def hidden(self) -> int:
        """Hidden units of its MLP; where none is shown as many as most have, for estimates."""
        return self.mlp.hidden if self.mlp else 4 * self.width

    @property
    def attention(self) -> AttentionView:
        spec, found = self.architecture.attention_of(self.module), self.architecture.cached
        if found is not None:
            spec = replace(spec, cached=found[self.index])
        return read_attention(spec, self.module, self.config)

    def taken(self, hidden: Tensor) -> Tensor:
        """What the block takes of ``(B, T, D)``: ``(T, D)`` where all samples stand in one sequence."""
        return hidden[0] if self.architecture.attention.packed else hidden

    @property
    def experts(self) -> ExpertsView | Any:
        """``None`` in a block without; families may have blocks of both kinds."""
        spec = self.architecture.experts
        return read_experts(spec, self.module, self.config) if spec else None

    @property
    def experts_owners(self) -> dict[str, nn.Module]:
        """Return what holds the experts and their router, by path."""
        return {path: self.module.get_submodule(path) for path in self.experts.spec.owners}

    @property
    def mlp_spec(self) -> MLPSpec | None:
        """Where a block of its kind keeps the MLP that all tokens go through; ``None``: it has none."""
        experts = self.experts
        return experts.spec.shared if experts else self.architecture.mlp

    @property
    def mlp(self) -> MLPView | Any:
        """Beside experts the one that all tokens go through; ``None`` where there is none."""
        spec = self.mlp_spec
        return MLPView(spec, self.module) if spec and part_at(self.module, spec.down) is not None else None

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Its linear layers, by what they compute, as far as it has them: ``q``, ``k``, ``v`` or the fused ``qkv``;
        ``o``; ``gate``, ``up`` (with the gate in it where that is fused) and ``down`` of an MLP that is shown."""
        modules = self.attention.qkv_modules
        names = {3: ("q", "k", "v"), 1: ("qkv",), 0: ()}[len(modules)]
        found = dict(zip(names, modules, strict=True))
        found |= {"o": self.attention.output_module} if self.attention.spec.is_there else {}
        paths = self.mlp.paths if self.mlp else {}
        return found | {name: self.module.get_submodule(path) for name, path in paths.items()}

    @property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Statistic of an input -> paths of the linear layers that read it, as they are stored; without experts."""
        attention, mlp = self.architecture.attention_of(self.module), self.mlp.spec if self.mlp else None
        inputs = tuple(f"{attention.path}.{name}" for name in attention.qkv)
        found = {"attention_input": inputs} if inputs else {}
        if attention.is_there:
            found["attention_output"] = (self.attention.output_path,)
        if mlp is not None:
            found |= {"mlp_input": tuple(path for path in (mlp.gate, mlp.up) if path), "mlp_hidden": (mlp.down,)}
        return found

    def weights(self, paths: tuple[str, ...]) -> list[Tensor]:
        """``(out, in)`` of each of these linear layers."""
        return [read_linear(self.module.get_submodule(path)).weight for path in paths]

    @property
    def relu(self) -> bool:
        """Whether the MLP is ``down(relu(up(x)))``: methods that solve for its activations need that closed form."""
        keys = ("activation_function", "hidden_act", "activation")
        gated = self.mlp is None or self.mlp.spec.gate or self.mlp.spec.fused_gate
        return not gated and any(getattr(self.config, key, None) == "relu" for key in keys)

    @property
    def middle(self) -> nn.Module | None:
        """The module whose input is the residual stream between attention and MLP; ``None`` in a parallel block."""
        path = self._trait(self.architecture.middle)
        # A block whose stream changes its width has one name for it, whatever its family calls it.
        return (getattr(self.module, "middle", None) or self.module.get_submodule(path)) if path else None

    @property
    def norms(self) -> tuple[Norm, Norm]:
        """Whose outputs attention and MLP read; the same twice where they share one."""
        spec = self.architecture.norms
        assert spec is not None  # asked of families whose stream can be sliced only
        attention, mlp = (
            next(module for n in names if (module := getattr(self.module, n, None)) is not None)
            for names in (spec.attention, spec.mlp)
        )
        return (
            read_norm(attention, offset=spec.offset, is_layernorm=spec.is_layernorm),
            read_norm(mlp, offset=spec.offset, is_layernorm=spec.is_layernorm),
        )

    def norm_after(self, layer: nn.Module) -> Norm | None:
        """What the output of one of its output projections goes through before it is added; ``None``: nothing, or the
        projection has a bias, which would be divided too, and could not take a mean then."""
        names, layers = self.architecture.norms_after, self.layers
        if names and self.experts and self.experts.spec.norms_after:
            names = (names[0], self.experts.spec.norms_after[0])
        for name, place in zip(names or (), ("o", "down"), strict=False):
            if layers.get(place) is layer and getattr(layer, "bias", None) is None:
                return read_norm(self.module.get_submodule(name), offset=0.0, is_layernorm=False)
        return None

    @property
    def norm_after_experts(self) -> Norm | None:
        """What the sum of the outputs of experts goes through before it is added; ``None``: nothing."""
        names = self.experts.spec.norms_after
        return read_norm(self.module.get_submodule(names[1]), offset=0.0, is_layernorm=False) if names else None

    @property
    def is_plain_residual(self) -> bool:
        """Whether attention and MLP add their outputs to the residual stream as they are."""
        return self._trait(self.architecture.is_plain_residual)

    def _trait(self, trait: T | ByConfig[T]) -> T:
        return cast(T, trait.of(self.config) if isinstance(trait, ByConfig) else trait)
