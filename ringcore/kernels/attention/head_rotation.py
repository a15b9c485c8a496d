"""What happens to the heads of q and k between the QKV projection and attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["HeadRotation"]


class HeadRotation(NamedTuple):
    """Of a step's tokens in a layer: QK norm of each head, and rotary embedding (RoPE), as `qk_norm_rope` applies
    them."""

    cos_sin: torch.Tensor  # [n, head_size] float32, cosine and sine of each pair interleaved
    norm_weight: torch.Tensor | None  # [2, head_size]: q's, then k's
    eps: float  # of the norm
