"""Weights of which two in every four become zero; the layers keep their shapes, so what comes out is a stock model.

Shape legend: O outputs of all layers that read one input, N that input.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...allocation import Allocation, Budget, Parameters, Uniform
from ...architectures import Architecture, BlockView, as_stored
from ...calibration.moments import BlockMoments
from ...errors import OptionError, UnsupportedModelError, method_option, option
from ...linalg.lowrank import metric_error
from ...linalg.semi_structured import GROUP, KEPT, activation_scores, gradient_scores, largest_of_four, surgeon
from ..base import BlockResult, Method, PrunableModule
from ..work import Work, calling, multiplying, passing, times

SPARSITY = 1 - KEPT / GROUP


# Module -> statistic of the input that its layers read; fused layers are taken as they are stored.
INPUTS = {"qkv": "attention_input", "o": "attention_output", "up": "mlp_input", "down": "mlp_hidden"}


@dataclass(frozen=True)
class TwoOfFour(Method):
    """Set two of every four consecutive weights of an output to zero (2:4, for sparse tensor cores).

    Modules: ``qkv``, ``o``, ``up`` (with the gate) and ``down``; a rank is what stays of four, 2 or 4. The sparsity is
    0.5 and counts zeros: shapes, bytes and cache stay as they are. ``allocation`` has no meaning here.
    """

    all_modules: ClassVar[tuple[str, ...]] = tuple(INPUTS)
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Uniform,)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters,)
    leaves_zeros: ClassVar[bool] = True
    workspace: ClassVar[tuple[float, float]] = (0.0, 17.0)  # weights and scores of gate and up as one

    sparsity: float = SPARSITY

    def kept(self, W: Tensor, C: Tensor, gradients: list[Tensor]) -> Tensor:
        """``(O, N)`` fp64: the weight with two zeros in every four.

        Args:
            W: ``(O, N)`` fp64, of all layers of a module.
            C: ``(N, N)`` second moment of their input.
            gradients: ``(out, in)`` of every layer, root mean square over windows of the loss's gradient; empty where
                the method looks at none.
        """
        raise NotImplementedError

    def _check_pattern(self) -> None:
        """Not before there is a model: in a comparison this is one row that cannot be done, not a wrong command."""
        for sparsity in self.own_sparsities.values() if self.own_sparsities else (self.sparsity,):
            if sparsity not in (0, SPARSITY):
                raise OptionError(
                    f"method {self.name} keeps {KEPT} of {GROUP} weights, so its sparsity is {SPARSITY}, got "
                    f"{sparsity}; take {SPARSITY}, or a method that makes tensors smaller, "
                    f"such as {option('method', 'rankfold')}"
                )
        if self.exclude_blocks or self.scope == "model" or (self.modules and not self.own_sparsities):
            raise OptionError(
                f"method {self.name} takes a half of all linear weights of the blocks; leave out exclude_blocks and "
                f"scope=model, and give modules their own sparsity, such as "
                f"{method_option('modules', {'down': SPARSITY})}"
            )

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        self._check_pattern()
        there = [module for module, statistic in INPUTS.items() if statistic in view.readers]
        elsewhere = _elsewhere(architecture) if self.modules else ()
        for module in self.modules or self.all_modules:
            in_experts = view.experts and module in ("up", "down")
            half_of_all = in_experts and not self.modules  # out of reach where a shared expert alone is taken
            if module not in (*there, *elsewhere) or half_of_all:
                rest = dict.fromkeys(there, SPARSITY)
                reason = "; the stacked weights of experts are not taken" if in_experts else ""
                if module == "qkv" and view.attention.spec.unsupported_reason:
                    reason = f" ({view.attention.spec.unsupported_reason})"
                lacks = "experts" if module in there else f"no linear layers that are module {module!r}"
                raise UnsupportedModelError(
                    f"block {view.index} of {architecture.model_type} has {lacks}{reason}; use "
                    f"{method_option('modules', rest)}"
                )
        wanted = tuple(m for m in there if m in (self.modules or there))
        for module in wanted:
            width = _weights(view, module)[0].shape[1]
            if width % GROUP:
                raise UnsupportedModelError(
                    f"{architecture.model_type} has {width} inputs in module {module!r}, no multiple of {GROUP}; "
                    "leave it out"
                )
        return wanted

    def statistics(self, view: BlockView) -> set[str]:
        return {INPUTS[module] for module in self.supported_modules(view.architecture, view)}

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        found = []
        for module in self.supported_modules(view.architecture, view):
            dense = sum(weight.numel() for weight in _weights(view, module))
            found.append(PrunableModule(view.index, module, (KEPT, GROUP), (dense * KEPT // GROUP, dense)))
        return found

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        return 0, 0

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        found = Work()
        for module in (module for module, rank in ranks.items() if rank < GROUP):
            weights = _weights(view, module)
            found += self.work_of(sum(len(weight) for weight in weights), weights[0].shape[1])
        return found

    def work_of(self, out: int, wide: int) -> Work:
        """Count what is done to an ``(out, wide)`` weight: the choice among each four, and its errors."""
        return times(multiplying(out, wide, wide), 2) + passing(out * wide, 60) + passing(wide * wide, 10)

    def decompose(self, view: BlockView, moments: BlockMoments, ranks: dict[str, int]) -> BlockResult:
        result = BlockResult()
        for module, rank in ranks.items():
            result.reports[module] = {"rank": rank, "of": GROUP, "relative_error": 0.0}
            if rank < GROUP:
                self._mask(view, module, moments, result)
        return result

    def _mask(self, view: BlockView, module: str, moments: BlockMoments, result: BlockResult) -> None:
        statistic, dense = INPUTS[module], _weights(view, module)
        W = torch.cat(dense).double()
        squares = [moments[name] for name in _fishers(view, module) if name in self.gradients(view)]
        gradients = [(moment.total.double() / moment.count).sqrt() for moment in squares]
        kept = self.kept(W, moments[statistic].second_moment(), gradients)
        parts = kept.split([len(weight) for weight in dense])
        for path, weight, now in zip(view.readers[statistic], dense, parts, strict=True):
            result.state[f"{path}.weight"] = as_stored(view.module.get_submodule(path), now.to(weight.dtype))

        def error(others: BlockMoments) -> float:
            return metric_error(W - kept, W, others[statistic].second_moment())

        result.errors[module] = error
        result.reports[module] |= {"zeros": int((kept == 0).sum()), "relative_error": error(moments)}


def _elsewhere(architecture: Architecture) -> tuple[str, ...]:
    """Modules that other blocks may have, where blocks differ in kind."""
    if not architecture.mixers:
        return ()
    return (*(["qkv"] if architecture.attention.qkv else []), "o", *(["up", "down"] if architecture.mlp else []))


def _fishers(view: BlockView, module: str) -> list[str]:
    """Statistics of the squared gradients of its layers, in the order of :func:`_weights`."""
    names = {layer: name for name, layer in view.layers.items()}
    return [f"{names[view.module.get_submodule(path)]}_fisher" for path in view.readers[INPUTS[module]]]


def _weights(view: BlockView, module: str) -> list[Tensor]:
    return view.weights(view.readers[INPUTS[module]])


@dataclass(frozen=True)
class Wanda(TwoOfFour):
    """The two weights stay whose size times the norm of their input is largest: Wanda (arXiv:2306.11695).
    None is changed.
    """

    name: ClassVar[str] = "wanda"
    compared_mode: ClassVar[str] = "sequential"  # as in its paper

    def kept(self, W: Tensor, C: Tensor, gradients: list[Tensor]) -> Tensor:
        return torch.where(largest_of_four(activation_scores(W, C)), W, 0.0)


@dataclass(frozen=True)
class SparseGPT(TwoOfFour):
    """Optimal brain surgery column by column: SparseGPT (arXiv:2301.00774).

    Attributes:
        ridge: relative damping of the moments.
    """

    name: ClassVar[str] = "sparsegpt"
    compared_mode: ClassVar[str] = "sequential"  # as in its paper
    workspace: ClassVar[tuple[float, float]] = (3.0, 6.0)  # a copy, its inverse and the factor of that

    ridge: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        if not self.ridge > 0:
            raise OptionError(f"ridge must be > 0, got {self.ridge}; the default is 0.01")

    def work_of(self, out: int, wide: int) -> Work:
        surgery = Work({("inverse", wide): 1.0, ("cholesky", wide): 1.0}) + multiplying(out, wide, wide)
        return super().work_of(out, wide) + surgery + calling(12 * wide)

    def kept(self, W: Tensor, C: Tensor, gradients: list[Tensor]) -> Tensor:
        return surgeon(W, C, ridge=self.ridge)


@dataclass(frozen=True)
class PrunerZero(TwoOfFour):
    """The two weights stay whose square times the scaled gradient of the loss is largest:
    Pruner-Zero (arXiv:2406.02924).

    The metric its search found. Gradients are of the dense model: the root mean square over the windows of a backward
    pass, which forms and keeps one for every weight. No weight is changed.
    """

    name: ClassVar[str] = "pruner-zero"

    def gradients(self, view: BlockView) -> set[str]:
        modules = self.supported_modules(view.architecture, view)
        return {name for module in modules for name in _fishers(view, module)}

    def kept(self, W: Tensor, C: Tensor, gradients: list[Tensor]) -> Tensor:
        layers = W.split([len(gradient) for gradient in gradients])
        scores = [gradient_scores(layer, gradient) for layer, gradient in zip(layers, gradients, strict=True)]
        return torch.where(largest_of_four(torch.cat(scores)), W, 0.0)
