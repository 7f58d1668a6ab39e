"""What a model costs to run: multiply-accumulates, parameters, cache. Counted while it runs, and by closed formula.

Shape legend: T tokens of one sequence, H query heads, R query-key width, V value width, D model width.

All products are counted as they are computed: the T x T scores in full, although half of them are masked. One
multiply-accumulate (MAC) is two floating-point operations (FLOPs); norms, activations and softmax are not counted.
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .._utils.evaluating import cache_for, states_of_tokens
from ..architectures import BlockView, architecture_of
from ..compression.budget import attended_macs, check_countable, token_modules
from ..errors import OptionError, UnsupportedModelError
from ..models.dense_model import DenseModel
from ..modules import CompressedAttention, LatentLinear, SparseLinear, SplitHeadLinear
from ..modules.factors import triangle_macs
from ..report.plan import Plan

DEFINITION = (
    "MACs per token of one forward over T tokens without cache: every weight of a linear map once (head included, "
    "embedding not), and heads x (query-key width + value width) x T for the attention of each block, mask not used; "
    "FLOPs are twice that"
)


def complexity(model: PreTrainedModel, tokens: int = 128) -> dict:
    """Cost of a loaded model, dense or compressed.

    Args:
        model: a causal language model in eval mode.
        tokens: T, at least 1.

    Returns:
        ``{"tokens", "macs_per_token", "flops_per_token", "linear_macs_per_token", "attention_macs_per_token",
        "parameters", "kv_bytes_per_token", "definition"}``; MACs by :func:`counted_macs`, the cache by filling one.

    Raises:
        UnsupportedModelError: see :func:`formula_macs`.
    """
    macs, parts = counted_macs(model, tokens), formula_macs(model, tokens)
    return {
        "tokens": tokens,
        "macs_per_token": macs / tokens,
        "flops_per_token": 2 * macs / tokens,
        "linear_macs_per_token": parts["linear"] / tokens,
        "attention_macs_per_token": parts["attention"] / tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "kv_bytes_per_token": cache_bytes(model),
        "definition": DEFINITION,
    }


@torch.no_grad()
def counted_macs(model: PreTrainedModel, tokens: int) -> int:
    """MACs of one forward over ``tokens`` tokens, counted operation by operation by PyTorch.

    Attention runs by its formula meanwhile: the counter does not see inside fused kernels on every device, and these
    pad. Rotary angles (frequency times position, no weights) are left out: whether they are a matrix product changes
    with versions.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    with _eager(model), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    names = (name for name, module in model.named_modules() if type(module).__name__.endswith("RotaryEmbedding"))
    counts = counter.get_flop_counts()  # qualified module name -> operator -> FLOPs; modules without any are missing
    angles = sum(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in names)
    sparse = sum(_nonzeros(module) for module in model.modules())  # an embedding bag, which the counter does not know
    return (counter.get_total_flops() - angles) // 2 + tokens * sparse


def formula_macs(model: PreTrainedModel, tokens: int) -> dict[str, int]:
    """MACs of one forward over ``tokens`` tokens from the shapes of the model's modules alone.

    Returns:
        ``{"linear", "attention", "total"}``.

    Raises:
        UnsupportedModelError: a mixture of experts, where the count depends on the routing.
    """
    architecture, config = architecture_of(model), model.config.get_text_config()
    if architecture.derived:
        raise UnsupportedModelError(f"model type {architecture.model_type!r} has no spec to count by; use counted_macs")
    check_countable(architecture, "use counted_macs")
    attention = 0
    for index, block in enumerate(model.get_submodule(architecture.blocks).children()):
        module = block.get_submodule(architecture.attention.path)
        if isinstance(module, CompressedAttention):
            attention += module.heads * (module.qk_dim + module.vo_dim)
        else:
            view = BlockView(architecture, index, block, config).attention
            attention += 2 * view.heads * view.head_dim
    parts = {
        "linear": tokens * sum(map(_linear, token_modules(model, architecture))),
        "attention": tokens * tokens * attention,
    }
    return parts | {"total": sum(parts.values())}


def planned_macs(source: DenseModel, plan: Plan, tokens: int) -> dict[str, int]:
    """What :func:`formula_macs` will say of the model that a plan leads to; the source's weights may be on the meta
    device.

    Raises:
        UnsupportedModelError: see :func:`formula_macs`.
        OptionError: the junction ``lu``, one per head, or bases that blocks share: what is not stored, or once only, is
            multiplied all the same.
    """
    chosen = plan.method
    if chosen.get("junction") == "lu" or chosen.get("head_junction") or chosen.get("group_size", 1) > 1:
        raise OptionError(
            "MACs of junction=lu, head_junction=true and shared bases do not follow from the weights stored; "
            "count the compressed model"
        )
    parts = formula_macs(source.model, tokens)
    views, saved = [source.meta_block(index) for index in range(len(source))], 0
    for m in plan.modules:
        full, left = (attended_macs(views[m.block], m.module, rank) for rank in (m.of, m.rank))
        saved += full - left
    removed = 0 if "zeros" in plan.facts else plan.removed_weights  # zeros are multiplied too
    linear, attention = parts["linear"] - tokens * removed, parts["attention"] - tokens * tokens * saved
    return {"linear": linear, "attention": attention, "total": linear + attention}


@torch.no_grad()
def cache_bytes(model: PreTrainedModel) -> int:
    """Bytes by which the cache grows with every token."""
    tokens = 8
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    filled = cache_for(model)
    model(ids, use_cache=True, **filled)
    (cache,) = filled.values()
    return sum(x[0].nbytes // x.shape[-2] for layer in cache.layers for x in states_of_tokens(layer))


def _linear(module: nn.Module) -> int:
    """MACs per token of one module without its linear layers; only the identity of a junction is not multiplied."""
    if isinstance(module, nn.Linear | Conv1D):
        return module.weight.numel()
    if isinstance(module, LatentLinear):
        identity = module.rank**2 if module.form.startswith("block_identity") else 0
        if module.form == "triangles":
            identity = 2 * (module.rank**2 - triangle_macs(module.rank))
        all_of_it = module.rank * (module.in_features + module.out_features) - identity + _nonzeros(module)
        return all_of_it - sum(_linear(factor) for factor in module.children() if isinstance(factor, nn.Linear))
    if isinstance(module, SplitHeadLinear):
        return sum(f.weight.numel() for f in (module.A, module.B) if not isinstance(f, nn.Linear))
    return _nonzeros(module)


def _nonzeros(module: nn.Module) -> int:
    """Values of a sparse layer, or of a sparse correction."""
    sparse = module.sparse if isinstance(module, LatentLinear | SparseLinear) else None
    return 0 if sparse is None else sparse.values.numel()


@contextmanager
def _eager(model: PreTrainedModel):
    before: Any = model.config._attn_implementation
    model.config._attn_implementation = "eager"  # Falcon ignores set_attn_implementation
    try:
        yield
    finally:
        model.config._attn_implementation = before
