"""What is to run the result, and the ranks it can take without padding.

An engine's kernels and a format's classes allow some widths only. Where the ranks are chosen among these, an export or
an engine keeps all that a compression has saved (docs/serve.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .._utils.present import present
from ..architectures import BlockView, check_stock
from ..errors import OptionError, method_option

HEADS = ("qk", "vo", "heads")  # modules whose ranks are widths, or the number, of heads


@dataclass(frozen=True)
class Target:
    """What the ranks may be; the full one always may."""

    heads: int | None = 1  # widths of heads are multiples of this; None: no fewer and no narrower heads
    least: int = 1  # the narrowest head
    inner: int = 1  # all other ranks are multiples of this
    wide: int = 1  # ... and of this, where the dense model's own widths are
    common: bool = False  # whether all blocks have one width
    empty: bool = False  # whether a module may have no width at all


TARGETS = {
    "transformers": Target(empty=True),
    # Head sizes of its kernels on the CPU; those on GPUs take multiples of 8 and these among them.
    "vllm": Target(heads=16, least=32, inner=32),
    # GGUF has one width of heads for a model, with all pairs or the same ones everywhere (option head_dim); a quantised
    # row is cut into blocks of 32 (Q8_0) or 256.
    "llama.cpp": Target(heads=None, inner=32, wide=256),
    "stock": Target(heads=None, common=True),
}


def fitted(units: Iterable, view: BlockView, method) -> list:
    """The units of a block with the ranks that the method's target allows; a unit may have the full one only.

    Raises:
        OptionError: a module was asked for by name that the target leaves dense.
        UnsupportedModelError: the target is a stock model, and no config of the family is known.
    """
    target = TARGETS[method.target]
    narrow = [unit for unit in units if unit.fixed and unit.module in HEADS]
    for unit in narrow:
        _check_width(unit.ranks[0], view, method.target)
    if target.heads is None and not narrow:
        asked = [m for m in method.modules or () if m in HEADS]
        if asked:
            raise OptionError(
                f"what runs on {method.target} has heads as many and as wide as the dense ones, got module "
                f"{asked[0]!r}; leave it out, give all heads one width by the option head_dim, "
                f"or take {method_option('target', 'transformers')}"
            )
        units = [unit for unit in units if unit.module not in HEADS]
    if target.common:
        check_stock(view.config, f"take {method_option('target', 'transformers')}")
        units = [unit for unit in units if _has_field(unit, view)]
    return [unit if unit in narrow else _fitted(unit, view, target) for unit in units]


def _check_width(width: int, view: BlockView, name: str) -> None:
    """Raise :class:`OptionError` unless the target takes heads of this width, all of the same rotary pairs."""
    target = TARGETS[name]
    if target.heads is None and not view.attention.takes_pairs:
        raise OptionError(
            f"head_dim {width} has no place in a stock {view.architecture.model_type}: its class has no width of "
            f"heads, or not all of a head turns alike; leave head_dim out, "
            f"or take {method_option('target', 'transformers')}"
        )
    if target.heads is not None and (width % target.heads or width < target.least):
        raise OptionError(
            f"{name} takes heads of widths that are multiples of {target.heads} from {target.least} on, "
            f"got head_dim {width}"
        )


def _fitted(unit, view: BlockView, target: Target):
    full, step, least = unit.ranks[-1], target.inner, 1
    if unit.module in HEADS:
        step, least = target.heads, target.least
    elif full % target.wide == 0 and view.width % target.wide == 0:
        step = max(step, target.wide)

    def allowed(rank: int) -> bool:
        return rank == full or (rank % present(step) == 0 and rank >= least if rank else target.empty)

    kept = [n for n, rank in enumerate(unit.ranks) if allowed(rank)]
    return replace(unit, ranks=tuple(unit.ranks[n] for n in kept), sizes=tuple(unit.sizes[n] for n in kept))


def _has_field(unit, view: BlockView) -> bool:
    """Tell whether a field of the config says how wide a module of hidden units is; for others it is a matter of heads
    and counts."""
    part = {"mlp": view.mlp, "experts": view.experts}.get(unit.module)
    return part is None or part.spec.width is not None
