"""Attention of one new token to a cache is the last row of attention of all tokens at once."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from rankfold.modules import build
from rankfold.modules.attention import eager_attention

B, T, D, H, K, WIDE = 3, 7, 32, 4, 2, 8
WIDTHS = [(8, 8), (8, 4), (4, 8), (6, 4), (2, 8)]


def attention(qk: int, vo: int):
    config = LlamaConfig(hidden_size=D, num_attention_heads=H, num_key_value_heads=K, max_position_embeddings=64)
    config._attn_implementation = "sdpa"
    widths = {"q": (D, H * qk), "k": (D, K * qk), "v": (D, K * vo), "o": (H * vo, D)}
    spec = {name: {"kind": "linear", "in": m, "out": n, "bias": False} for name, (m, n) in widths.items()}
    spec |= {"kind": "attention", "heads": H, "kv_heads": K, "qk_dim": qk, "vo_dim": vo, "rotary_dim": WIDE}
    torch.manual_seed(0)
    module = build(spec | {"scaling": 0.4, "selected_pairs": qk < WIDE}, LlamaAttention(config, 0), config).eval()
    if qk < WIDE:  # other pairs in every head, and one that does not turn
        module.rotary_pairs.copy_(torch.stack([torch.randperm(WIDE // 2 + 1)[: qk // 2] for _ in range(K)]))
    return module, LlamaRotaryEmbedding(config)


@torch.no_grad()
@pytest.mark.parametrize("qk, vo", WIDTHS)
@pytest.mark.parametrize("padded", [False, True])
def test_steps_are_rows_of_the_whole(qk, vo, padded):
    module, rotary = attention(qk, vo)
    x, mask = torch.randn(B, T, D), torch.ones(B, 1, T, T).bool().tril()
    if padded:
        mask[1, ..., :2] = False
    module.config._attn_implementation = "eager"
    expected, weights = module(x, position_embeddings=rotary(x, torch.arange(T)[None]), attention_mask=mask)
    assert weights.shape == (B, H, T, T)
    module.config._attn_implementation = "sdpa"
    cache = DynamicCache()
    for at in range(T):
        given = {"position_embeddings": rotary(x, torch.tensor([[at]])), "past_key_values": cache}
        row = mask[:, :, at : at + 1, : at + 1] if padded else None
        found = module(x[:, at : at + 1], attention_mask=row, **given)[0]
        rows = [0, 2] if at < 2 and padded else slice(None)  # of no tokens there is no mean
        torch.testing.assert_close(found[rows, 0], expected[rows, at], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("qk, vo", [(8, 4), (4, 8)])
def test_flash_attention_gets_one_width_of_one_token_too(qk, vo, monkeypatch):
    """Its kernels take no others; here the mathematics of eager attention stands in for them."""
    module, rotary = attention(qk, vo)
    x, widths = torch.randn(B, T, D), set()

    def flash(module, query, key, value, mask, **kwargs):
        widths.add((query.shape[-1], key.shape[-1], value.shape[-1]))
        return eager_attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    module.config._attn_implementation = "eager"
    expected, _ = module(
        x, position_embeddings=rotary(x, torch.arange(T)[None]), attention_mask=torch.ones(B, 1, T, T).bool().tril()
    )
    module.config._attn_implementation = "flash_attention_2"
    cache = DynamicCache()
    for at in range(T):
        given = {"position_embeddings": rotary(x, torch.tensor([[at]])), "past_key_values": cache}
        found = module(x[:, at : at + 1], attention_mask=None, **given)[0]
        torch.testing.assert_close(found[:, 0], expected[:, at], rtol=1e-5, atol=1e-5)
    assert widths == {(8, 8, 8)}
