"""Norms of queries and keys that lost dimensions."""

import pytest
import torch

import rankfold
from families import opened, tokens
from rankfold.methods.modegpt.norms import NAMES, SQUARES, predict_norms


@pytest.mark.parametrize(("family", "offset"), [("qwen3", 0.0), ("gemma3", 1.0), ("olmo2", 0.0)])
def test_what_is_kept_keeps_its_scale(family, offset):
    source, draw = opened(family), torch.Generator().manual_seed(0)
    attention, moments = source.block(0).attention, rankfold.calibrate(source, tokens(), statistics=set(SQUARES))[0]
    counts = (attention.heads, attention.kv_heads)
    kept = [torch.rand(n, attention.head_dim, generator=draw).argsort(1)[:, :4] for n in counts]
    found = predict_norms(attention, moments, tuple(kept)).tensors
    for name, keep in zip(NAMES, kept, strict=True):
        weight = getattr(attention.module, name).weight.detach() + offset
        rows = weight.view(-1, attention.head_dim).expand(len(keep), -1)  # one for all heads, or one for each
        assert torch.equal(found[f"{name}.weight"], torch.stack([row[of] for row, of in zip(rows, keep, strict=True)]))
