"""Whole prompts by cuDNN's fused attention, which has 1.5 times the throughput of kernels that read pages.

It takes prompts without cached tokens, since its causal mask is aligned to the upper left corner, and takes them as
dense padded batches: one length for all prompts of a call. (For packed input it rebuilds its plan in every call, in 30
ms.) It builds a plan for each new length, so lengths are rounded up to a few. The causal mask hides the padding after a
prompt from its tokens; padded keys and values are zeros all the same, since a weight of 0 would not mask a NaN.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec

__all__ = [
    "Prompts",
    "attend_prompts",
    "batches_of_equal_length",
    "can_fuse",
    "is_profitable",
    "split_by_kernel",
    "warm_up_fused_prompts",
]

_BACKEND = SDPBackend.CUDNN_ATTENTION
_MIN_TOKENS = 2048  # of a prompt: below, the padding copy and the launch of a separate call cost more than is gained
_LENGTHS_PER_OCTAVE = 8  # so padding adds a sixteenth, on average


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
        """Its query_len, rounded up to one of a few lengths per octave."""
        step = 1 << max((self.query_len - 1).bit_length() - 1, 0)
        step = max(step // _LENGTHS_PER_OCTAVE, 1)
        return -(-self.query_len // step) * step


def can_fuse(spec: KVCacheSpec, device: torch.device) -> bool:
    """Whether cuDNN has kernels for layers of `spec` on `device`."""
    return (
        device.type == "cuda"
        and isinstance(spec, FullAttentionSpec)
        and spec.v_head_size is None
        and spec.dtype in ("bfloat16", "float16")
        and spec.head_size % 8 == 0
        and spec.head_size <= 128
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    )


def warm_up_fused_prompts(
    spec: KVCacheSpec, num_heads: int, num_tokens: int, max_len: int, device: torch.device
) -> None:
    """Attends once, to zeros, in as many prompts of `max_len` tokens as fit in a step of `num_tokens`.

    The first call on a machine takes a second, in which cuDNN is loaded and the driver compiles its kernel, for
    whatever length; both are then ready for all threads.
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
    """[num_seqs] bool: long sequences that are whole prompts (nothing cached)."""
    result: np.ndarray = (query_lens == seq_lens) & (query_lens >= _MIN_TOKENS)
    return result


def split_by_kernel(metadata: AttentionMetadata, first: int, can_fuse: bool) -> list[tuple[int, int, bool]]:
    """The sequences from `first` on, as (first, end, whether cuDNN takes them) of neighbours with one kernel."""
    if first == metadata.num_seqs:
        return []
    fused = is_profitable(np.diff(metadata.query_start_loc_cpu), metadata.seq_lens_cpu)[first:]
    if not fused.any() or not can_fuse:
        return [(first, metadata.num_seqs, False)]
    edges = [first, *(first + 1 + np.flatnonzero(np.diff(fused))).tolist(), metadata.num_seqs]
    return [(a, b, bool(fused[a - first])) for a, b in itertools.pairwise(edges)]


def batches_of_equal_length(first_token: int, query_lens: list[int]) -> list[Prompts]:
    """Prompts of these lengths, packed from `first_token` on, as few batches of equal length."""
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
    key: torch.Tensor,  # [batch, padded_len, num_kv_heads, head_size], finite in the padding
    value: torch.Tensor,  # as key
    scale: float,
    out: torch.Tensor,  # as query
) -> None:
    """Causal self-attention of each prompt."""
    from ringcore.kernels.attention.prompt_padding import pad_prompts

    batch, query_len, padded_len = prompts.batch, prompts.query_len, prompts.padded_len
    dense = pad_prompts(query, query_len, padded_len)
    q, k, v = (rows.transpose(1, 2) for rows in (dense, key, value))
    with sdpa_kernel(_BACKEND):
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
    # One by one: each copy is contiguous then, at the full memory bandwidth.
    for into, prompt in zip(out.view(batch, query_len, *out.shape[1:]), attended, strict=True):
        into.copy_(prompt[:query_len])
