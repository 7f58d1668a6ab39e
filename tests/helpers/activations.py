"""Raw activations of a block, recorded in transformers' own modules: no moments and no views of rankfold.

Shape legend: B windows, T tokens of a window, n = B T, H query heads, K key/value heads, N head dimension, F hidden
width of the MLP, D model width.
"""

import contextlib
import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

BLOCKS = ("model.layers", "model.decoder.layers", "model.language_model.layers", "transformer.h", "gpt_neox.layers")
BLOCKS += ("transformer.blocks", "model.text_model.layers")
ATTENTION = ("self_attn", "attn.attention", "attn", "attention", "self_attention")
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
UP = ("mlp.up_proj", "mlp.gate_up_proj", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h", "fc1", "mlp.fc_in", "ffn.up_proj")
DOWN = ("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "fc2", "mlp.fc_out", "ffn.down_proj")


class Heads(NamedTuple):
    """What meets in attention, after norms and rotary embedding; queries times the softmax scale."""

    query: Tensor  # (B, H, T, N)
    key: Tensor  # (B, K, T, N)
    value: Tensor  # (B, K, T, N)


class Seen(NamedTuple):
    """What one forward showed of one block."""

    heads: Heads
    hidden: Tensor | None  # (n, F) input of the down projection; None where the MLP is made of experts


def member(owner: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The submodule that has one of these names."""
    for name in names:
        with contextlib.suppress(AttributeError):
            return owner.get_submodule(name)
    return None


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return member(model, BLOCKS)


def weight_of(module: nn.Module) -> Tensor:
    """``(out, in)``; GPT-2 stores the transpose."""
    return (module.weight if isinstance(module, nn.Linear) else module.weight.T).detach()


def spliced(dense: nn.Module, small: nn.Module, indices) -> nn.Module:
    """A copy of the dense model with these blocks of the compressed one."""
    model = copy.deepcopy(dense)
    for index in indices:
        blocks_of(model)[index] = blocks_of(small)[index]
    return model


@torch.no_grad()
def look(model: nn.Module, ids: Tensor | Mapping, index: int) -> Seen:
    """Run a model, dense or compressed, on ids or on all its inputs by name, and record block ``index``."""
    block, seen = blocks_of(model)[index], {}
    attention, down = member(block, ATTENTION), member(block, DOWN)
    hooks = [down.register_forward_pre_hook(lambda _, a: seen.update(hidden=a[0].flatten(0, -2)))] if down else []
    if hasattr(attention, "query_key_value") and not hasattr(attention, "rotary_ndims"):  # BLOOM, Falcon
        hooks.append(attention.register_forward_hook(_split_by_the_family(attention, seen), with_kwargs=True))
        hooks.append(attention.query_key_value.register_forward_hook(lambda _, __, out: seen.update(fused=out)))
    if hasattr(attention, "Wqkv"):
        hooks.append(attention.Wqkv.register_forward_hook(_split_in_three(attention, seen)))
    if hasattr(attention, "_attn"):
        _record_own(attention, seen)
    with _recording_attention(attention, seen):
        model(**(ids if isinstance(ids, Mapping) else {"input_ids": ids}), use_cache=False)
    for hook in hooks:
        hook.remove()
    attention.__dict__.pop("_attn", None)
    return Seen(seen["heads"], seen.get("hidden"))


@contextlib.contextmanager
def _recording_attention(wanted: nn.Module, seen: dict):
    """Most families, and compressed attention, hand queries, keys and values to a function of transformers."""
    choose = ALL_ATTENTION_FUNCTIONS.get_interface

    def recording(name, default):
        attend = choose(name, default)

        def record(module, query, key, value, *args, **kwargs):
            if module is wanted:
                seen["heads"] = Heads(query * kwargs["scaling"], key, value)
            return attend(module, query, key, value, *args, **kwargs)

        return record

    ALL_ATTENTION_FUNCTIONS.get_interface = recording
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def _split_in_three(attention: nn.Module, seen: dict):
    """MPT attends by itself; nothing comes between its projection and the scores."""

    def split(_, __, fused):
        q, k, v = (x.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for x in fused.chunk(3, -1))
        seen["heads"] = Heads(q * attention.softmax_scale, k, v)

    return split


def _record_own(attention: nn.Module, seen: dict) -> None:
    """GPT-J and GPT-Neo attend by a method of their own, which gets what meets."""
    attend, scale = attention._attn, getattr(attention, "scale_attn", 1.0)

    def record(query, key, value, *args):
        seen["heads"] = Heads(query / scale, key, value)
        return attend(query, key, value, *args)

    attention._attn = record


def _split_by_the_family(attention: nn.Module, seen: dict):
    """BLOOM and Falcon attend by themselves; they still split their fused projection by a method."""

    def split(_, args, kwargs, __):
        if hasattr(attention, "_reshape"):
            q, k, v = attention._reshape(seen["fused"])
        else:
            q, k, v = (x.transpose(1, 2) for x in attention._split_heads(seen["fused"]))
            each = k.shape[1] // attention.num_kv_heads  # the new architecture repeats keys and values
            k, v = k[:, ::each], v[:, ::each]
        if kwargs.get("alibi") is None:
            q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        seen["heads"] = Heads(q * attention.inv_norm_factor, k, v)

    return split
