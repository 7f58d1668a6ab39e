"""A size in place of a sparsity: that of all weights in the dtype written, or that of the GGUF file of the result.

In a file matrices have fewer bits than what stands around them, so that it does not shrink as the weights do. Its size
is known before anything is compressed, and what is removed follows from it.
"""

import math
from dataclasses import replace
from typing import Any

from ._utils.sizes import size_text
from .allocation import Bytes, Parameters, Uniform, unique_parameters
from .compression.budget import rank_options
from .errors import OptionError, UnsupportedModelError, option
from .exports.gguf_blocks import FORMATS
from .exports.gguf_size import bytes_of, check_sized, is_one_width
from .linalg.block_rounding import BLOCK
from .methods import Method
from .models.dense_model import DenseModel
from .models.weights import buffer_bytes
from .report.goal import Goal

ENGINE = "llama.cpp"  # runs GGUF files


def method_of_size(source: DenseModel, method: Method, goal: Goal | None) -> Method:
    """Return a method with the sparsity that leaves a model of at most so many bytes.

    Args:
        source: an open model.
        method: what to do; its sparsity is not used.
        goal: of :func:`.goal_of`. The bytes are those of all weights in the dtype written, embeddings, codes and
            indices included (``scope="model"``, ``budget="bytes"``); with a dtype those of the file that
            :func:`rankfold.export` makes of the result in the form ``gguf-deci`` (``scope="model"``,
            ``target="llama.cpp"``), or ``gguf`` where the family has no other (``target="stock"``,
            ``allocation="uniform"``). ``None``: the method stays as it is.

    Raises:
        OptionError: the model is no larger, its modules cannot lose so much, or the method has a budget, a target or
            sparsities of its own, or does not count bytes.
        UnsupportedModelError: there is no such file of the model.
    """
    if goal is None:
        return method
    _check(method, goal)
    if goal.dtype:
        return _of_file(source, method, goal, goal.dtype)
    weights = unique_parameters(source.model) * source.dtype.itemsize
    dense = weights + buffer_bytes(source.model, source.dtype)
    if goal.asked >= dense:
        raise OptionError(
            f"{option('target_size')} is what all weights take together, got {size_text(goal.asked)}, and those of "
            f"{source.name} take {size_text(dense)}; give a smaller size, or another dtype"
        )
    sparsity = (dense - goal.asked) / weights
    return _reachable(source, method, goal, dense, sparsity=sparsity, scope="model", budget=Bytes())


def _check(method: Method, goal: Goal) -> None:
    if Bytes not in method.budgets:
        raise OptionError(
            f"{option('target_size')} chooses ranks by bytes, and method {method.name} does not; give "
            f"{option('sparsity')} in its place, or take another method"
        )
    if goal.dtype and ENGINE not in method.targets:
        raise OptionError(
            f"a size in {goal.dtype} is that of a file for {ENGINE}, and method {method.name} does not write for it; "
            "give a size without a dtype, or take another method"
        )
    other = None
    if method.budget not in (Parameters(), Bytes()):
        other = f"budget {method.budget}"
    elif method.own_sparsities:
        other = "sparsities of single modules"
    if other:
        raise OptionError(
            f"{option('target_size')} is a budget of its own, so {other} would have no effect; leave one of them out"
        )


def _of_file(source: DenseModel, method: Method, goal: Goal, dtype: str) -> Method:
    """Find the sparsity for a size of the file, which shrinks by as many bytes for every weight of an MLP."""
    check_sized(source)
    method = _for_file(source, method, dtype)
    units, counted = rank_options(source, method)[:2]
    if others := sorted({unit.module for unit in units} - {"mlp"}):
        raise OptionError(
            f"the size of a GGUF file is known where MLPs get narrower and nothing else does, and method "
            f"{method.name} changes {', '.join(others)}; give a size without a dtype, or take another method"
        )
    widths = [view.mlp.hidden for view in source.meta_blocks()]
    if dtype in FORMATS and any(width % BLOCK for width in widths):
        raise UnsupportedModelError(
            f"{source.name} has MLPs {widths[0]} wide, which {dtype} cannot hold: its blocks are {BLOCK} numbers; give "
            "the size in float16, or without a dtype"
        )
    settings, numbers = bytes_of(source, widths, dtype)
    if goal.asked >= (dense := settings + numbers):
        raise OptionError(
            f"{option('target_size')} is what the file takes, got {size_text(goal.asked)}, and that of {source.name} "
            f"takes {size_text(dense)} in {dtype} as it is; export it, or give a smaller size"
        )
    # All blocks have the same layers, so one tells what is saved. Where widths differ, settings take a little more.
    changed = units if is_one_width(source) else units[:1]
    narrowest = {unit.block: unit.ranks[0] for unit in changed}
    settings, fewer = bytes_of(source, [narrowest.get(block, width) for block, width in enumerate(widths)], dtype)
    if goal.asked < (smallest := dense - len(units) // len(changed) * (numbers - fewer)):
        raise OptionError(
            f"{option('target_size')} {size_text(goal.asked)} cannot be reached: with the narrowest MLPs that {ENGINE} "
            f"takes, the file of {source.name} in {dtype} takes {size_text(smallest)}; give a larger size"
        )
    saved = (numbers - fewer) / sum(unit.sizes[-1] - unit.sizes[0] for unit in changed)
    sparsity = math.ceil((settings + numbers - goal.asked) / saved) / counted
    return _reachable(source, method, goal, dense, sparsity=sparsity)


def _for_file(source: DenseModel, method: Method, dtype: str) -> Method:
    """Return a method that makes MLPs narrower and nothing else, all alike where the file has one width for all."""
    alike, other = is_one_width(source), None
    target = "stock" if alike else ENGINE
    if method.target not in ("transformers", target):
        other = f"target {method.target}"
    elif alike and method.allocation not in (Uniform(), type(method)().allocation):
        other = f"allocation {method.allocation}"
    if other:
        widths = "one width" if alike else "a width of its own"
        raise OptionError(
            f"a GGUF file of {source.name} has {widths} for every MLP, which takes target {target}"
            f"{' and allocation uniform' if alike else ''}, so {other} would have no effect; leave it out"
        )
    changes: dict[str, Any] = {"scope": "model", "budget": Parameters(), "target": target}
    if alike:
        step = math.lcm(method.describe()["rank_multiple"], BLOCK if dtype in FORMATS else 1)
        changes |= {"allocation": Uniform(), "rank_multiple": step}
    return replace(method, **changes)


def _reachable(source: DenseModel, method: Method, goal: Goal, dense: int, *, sparsity: float, **changes) -> Method:
    """Return the method at a sparsity, or raise :class:`OptionError` where no ranks remove so much."""
    try:
        method = replace(method, sparsity=sparsity, **changes)
        rank_options(source, method).check(method)
    except OptionError as error:
        raise OptionError(
            f"{option('target_size')} {size_text(goal.asked)} of {size_text(dense)} is a sparsity of {sparsity:.4f}, "
            f"a larger size a lower one; {error}"
        ) from None
    return method
