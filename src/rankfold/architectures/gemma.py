"""Gemma: Llama's block. Gemma 2 and 3: norms before and after each half of it, sliding windows, soft caps, q/k-norm (3)."""

from dataclasses import replace

from .llama import LLAMA

GEMMA2 = replace(LLAMA, model_type="gemma2", middle="pre_feedforward_layernorm", adds=False)
GEMMA3 = replace(GEMMA2, model_type="gemma3_text", attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm")))

ARCHITECTURES = (replace(LLAMA, model_type="gemma"), GEMMA2, GEMMA3)
