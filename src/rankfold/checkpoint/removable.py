"""Which blocks of a model can be removed: those without which its class makes the same of all others."""

from torch import nn

from ..errors import UnsupportedModelError, first_line, option
from .config import compressed_config
from .load import empty_model
from .numbered import RULES, named_blocks

IGNORED = ("layer_idx", "layer_id", "training", *RULES)  # a place in the cache; a rule that a list stands for


def blocks_that_stay(source) -> frozenset[int]:
    """Blocks that cannot be removed, because one that took their place would be made into something else.

    Where some blocks have something else in place of attention, the last one with attention stays, too: the cache of
    transformers reads off it how long a text is.

    What a block is made of is compared, sizes and settings, between the model and one of its class whose config lacks a
    block at either end. So every setting that depends on a block's number is found, whatever its name.

    Raises:
        UnsupportedModelError: blocks depend on their number in a way that a config with fewer blocks cannot say.

    Cost: the model is built a few times without weights.
    """
    stay = set(named_blocks(source)) | _last_attention(source)
    while free := [block for block in range(len(source)) if block not in stay]:
        blocked = {gone for gone in {free[0], free[-1]} if _takes_its_place(source, gone)}
        if not blocked:
            return frozenset(stay)
        stay |= blocked
    raise UnsupportedModelError(
        f"every block of this {source.architecture.model_type} has a number that it depends on, so none can be "
        f"removed; use a method that makes blocks smaller, such as {option('method', 'rankfold')}"
    )


def _last_attention(source) -> set[int]:
    with_attention = [view.index for view in source.meta_blocks() if view.attention.cached]
    return set(with_attention[-1:]) if len(with_attention) < len(source) else set()


def _takes_its_place(source, gone: int) -> bool:
    """Whether the block next to a removed one alone becomes another one than it was."""
    kept = tuple(block for block in range(len(source)) if block != gone)
    if not kept:
        return False
    changed = _changed(source, kept)
    if not changed:
        return False
    next_to_it = kept[min(gone, len(kept) - 1)]
    if set(changed) == {next_to_it}:
        return True
    block = min(changed)
    raise UnsupportedModelError(
        f"block {block} of this {source.architecture.model_type} depends on its number: without block {gone} it has "
        f"another {changed[block]}, which its config cannot say; use a method that makes blocks smaller, such as "
        f"{option('method', 'rankfold')}"
    )


def _changed(source, kept: tuple[int, ...]) -> dict[int, str]:
    """Blocks that are made into something else where only these are kept, with the first thing that differs."""
    try:
        fewer = empty_model(compressed_config(source, {}, {}, kept))
    except Exception as error:  # a config that its class refuses ends in whatever type its checks raise
        raise UnsupportedModelError(
            f"{type(source.model).__name__} cannot be built with fewer blocks ({first_line(error)}); use a method that "
            f"makes blocks smaller, such as {option('method', 'rankfold')}"
        ) from error
    blocks = [*fewer.get_submodule(source.architecture.blocks).children()]
    pairs = ((block, source.blocks[block], blocks[place]) for place, block in enumerate(kept))
    return {block: found for block, before, now in pairs if (found := _difference(before, now))}


def _difference(before: nn.Module, now: nn.Module) -> str | None:
    """Name of the first tensor or setting in which two blocks differ."""
    ours, theirs = (_facts(module) for module in (before, now))
    return next((name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)), None)


def _facts(block: nn.Module) -> dict[str, object]:
    """Classes, shapes and plain settings of all that is in a block."""
    found: dict[str, object] = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
    for path, module in block.named_modules():
        found[f"{path} (class)"] = type(module).__name__
        for name, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | type(None))
            if plain and not name.startswith("_") and name not in IGNORED:
                found[f"{path}.{name}".lstrip(".")] = value
    return found
