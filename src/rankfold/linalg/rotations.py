"""Rotary position embedding as matrices between a query and a key.

Shape legend: h head dim, D relative offsets.
"""

import torch
from torch import Tensor


@torch.no_grad()
def rope_rotations(inv_freq: Tensor, head_dim: int, *, window: int = 5, causal: bool = True) -> Tensor:
    r"""Relative rotations ``Theta_delta`` with ``q_m^T k_n = q^T Theta_(n-m) k``, Hugging Face's half layout.

    LatentLLM Eq. 174: pairs are ``(i, i + n)`` with ``n = len(inv_freq)``; dims from ``2 n`` on do not rotate
    (partial rotary). Summing over all offsets is impractical, so a window is used; offsets weigh equally.

    Args:
        inv_freq: ``(n,)`` angles per position, ``1 <= n <= head_dim // 2``.
        head_dim: ``h``.
        window: largest distance, ``>= 0``; the paper suggests 5.
        causal: only keys at or before the query, ``n - m`` in ``[-window, 0]``; else both directions.

    Returns:
        ``(D, h, h)``, dtype of ``inv_freq``; orthogonal.

    Raises:
        ValueError: sizes out of range.
    """
    n = inv_freq.shape[0]
    if inv_freq.ndim != 1 or not 1 <= n <= head_dim // 2:
        raise ValueError(f"inv_freq must be (n,) with 1 <= n <= {head_dim // 2}, got {tuple(inv_freq.shape)}")
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    offsets = torch.arange(-window, 1 if causal else window + 1, dtype=inv_freq.dtype, device=inv_freq.device)
    angle = offsets[:, None] * inv_freq  # (D, n)
    theta = torch.eye(head_dim, dtype=inv_freq.dtype, device=inv_freq.device).repeat(len(offsets), 1, 1)
    i = torch.arange(n, device=inv_freq.device)
    theta[:, i, i] = theta[:, i + n, i + n] = angle.cos()
    theta[:, i, i + n], theta[:, i + n, i] = -angle.sin(), angle.sin()
    return theta
