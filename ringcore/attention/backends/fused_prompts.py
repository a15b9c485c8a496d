"""Whole prompts by cuDNN's fused attention, which multiplies half as fast again as kernels that read pages.

It takes prompts of which nothing is in the cache yet, since its causal mask begins in the upper left corner, and takes
them dense: one length for all prompts of a call. (Packed, it plans anew in every call, for 30 ms.) It plans once for
each length that it sees, so lengths are rounded up to a few. What is padded behind a prompt no token of it sees; keys
and values there are zeros all the same, since a weight of 0 would not hide a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec

__all__ = [
    "Prompts",
    "attend_prompts",
    "batches_of_equal_length",
    "can_fuse",
    "is_profitable",
    "warm_up_fused_prompts",
]

_BACKEND = SDPBackend.CUDNN_ATTENTION
_MIN_TOKENS = 2048  # of a prompt: below, copying it and the ramps of a call of its own cost what is gained
_LENGTHS_PER_OCTAVE = 8  # so a prompt gets a sixteenth longer, on the average


@dataclass(frozen=True, slots=True)
class Prompts:
    """`batch` neighbouring prompts of `query_len` tokens each."""

    first_token: int
    batch: int
    query_len: int

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.batch * self.query_len)

    @property
    def padded_len(self) -> int:
        """Its query_len, rounded up to what few lengths share."""
        step = 1 << max((self.query_len - 1).bit_length() - 1, 0)
        step = max(step // _LENGTHS_PER_OCTAVE, 1)
        return -(-self.query_len // step) * step


def can_fuse(spec: KVCacheSpec, device: torch.device) -> bool:
    """Whether cuDNN has kernels for layers of `spec` on `device`."""
    return (
        device.type == "cuda"
        and isinstance(spec, FullAttentionSpec)
        and spec.dtype in ("bfloat16", "float16")
        and spec.head_size % 8 == 0
        and spec.head_size <= 128
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    )


def warm_up_fused_prompts(
    spec: KVCacheSpec, num_heads: int, num_tokens: int, max_len: int, device: torch.device
) -> None:
    """Attends once, to zeros, in as many prompts of `max_len` tokens as a step of `num_tokens` has room for.

    A first call on a machine takes a second, in which cuDNN is loaded and the driver compiles its kernel, for whatever
    length; both are there for all threads then.
    """
    query_len = min(num_tokens, max_len)
    if query_len < _MIN_TOKENS or not can_fuse(spec, device):
        return
    prompts = Prompts(0, num_tokens // query_len, query_len)
    query_len, options = prompts.padded_len, {"dtype": getattr(torch, spec.dtype), "device": device}
    query = torch.zeros(prompts.batch * query_len, num_heads, spec.head_size, **options)
    key = torch.zeros(prompts.batch, query_len, spec.num_kv_heads, spec.head_size, **options)
    attend_prompts(Prompts(0, prompts.batch, query_len), query, key, key, scale=1.0, out=torch.empty_like(query))


def is_profitable(query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """[num_seqs] bool: sequences that are whole prompts, and long ones."""
    result: np.ndarray = (query_lens == seq_lens) & (query_lens >= _MIN_TOKENS)
    return result


def batches_of_equal_length(first_token: int, query_lens: list[int]) -> list[Prompts]:
    """Prompts of these lengths, one behind the other from `first_token` on, as few calls."""
    prompts: list[Prompts] = []
    for query_len in query_lens:
        last = prompts[-1] if prompts else None
        if last is not None and last.query_len == query_len:
            prompts[-1] = Prompts(last.first_token, last.batch + 1, query_len)
        else:
            prompts.append(Prompts(first_token, 1, query_len))
        first_token += query_len
    return prompts


def attend_prompts(
    prompts: Prompts,
    query: torch.Tensor,  # [batch * query_len, num_heads, head_size]
    key: torch.Tensor,  # [batch, padded_len, num_kv_heads, head_size], numbers behind a prompt too
    value: torch.Tensor,  # as key
    scale: float,
    out: torch.Tensor,  # as query
) -> None:
    """Causal attention of each prompt to itself."""
    from ringcore.kernels.prompt_padding import pad_prompts

    batch, query_len, padded_len = prompts.batch, prompts.query_len, prompts.padded_len
    dense = pad_prompts(query, query_len, padded_len)
    q, k, v = (rows.transpose(1, 2) for rows in (dense, key, value))
    with sdpa_kernel(_BACKEND):
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
    # One by one: each is a run of memory then, which is copied at the memory's own speed.
    for into, prompt in zip(out.view(batch, query_len, *out.shape[1:]), attended, strict=True):
        into.copy_(prompt[:query_len])
