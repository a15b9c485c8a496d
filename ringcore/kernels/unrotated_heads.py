"""Heads between the QKV projection and attention, for kernels that rotate them where they are read."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["UnrotatedHeads"]


class UnrotatedHeads(NamedTuple):
    """A step's q, k and v before head norms, rotary embedding (RoPE) and the KV cache write: what `qk_norm_rope` takes.

    norm_gain: of the head norms, q's then k's; None: the model has none.
    """

    qkv: torch.Tensor  # [n, (num_heads + 2 * num_kv_heads) * head_size], contiguous, pairs interleaved
    cos_sin: torch.Tensor  # [n, head_size] float32, cosine and sine of each pair of the token, interleaved
    norm_gain: torch.Tensor | None  # [2, head_size]
    eps: float
