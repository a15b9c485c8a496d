"""Attention of dense batches on a CPU: by torch's fused kernel where it can, else by the scores themselves."""

from __future__ import annotations

import torch
from torch.nn import functional

from ringcore.attention.spec import AttentionSpec

__all__ = ["attend", "attend_prompts"]

_TILE_ROWS = 256  # rows of scores that exist at a time, over all prompts of a batch


def attend(
    query: torch.Tensor,  # [batch, heads, rows, head_size]
    key: torch.Tensor,  # [batch, kv_heads, num_tokens, head_size]
    value: torch.Tensor,  # [batch, kv_heads, num_tokens, v_head_size]
    layer: AttentionSpec,
    sinks: torch.Tensor | None,  # float32, broadcasts to [batch, heads, rows, 1]
    mask: torch.Tensor | None = None,  # added to the scores; broadcasts to [batch, heads, rows, num_tokens]
    *,
    enable_gqa: bool = False,
) -> torch.Tensor:  # [batch, heads, rows, v_head_size]
    """enable_gqa: `heads` is a multiple of `kv_heads`, and neighbouring heads share one; else they are equal."""
    if layer.is_plain:
        if query.shape[3] == value.shape[3]:  # one call less, for decodes
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=layer.scale, enable_gqa=enable_gqa
            )
        return _fused(query, key, value, layer.scale, mask, is_causal=False, enable_gqa=enable_gqa)
    return _by_scores(query, key, value, layer, sinks, mask)


def attend_prompts(
    query: torch.Tensor,  # [batch, heads, query_len, head_size]
    key: torch.Tensor,  # [batch, kv_heads, query_len, head_size]
    value: torch.Tensor,  # [batch, kv_heads, query_len, v_head_size]
    layer: AttentionSpec,
    sinks: torch.Tensor | None,
    *,
    enable_gqa: bool,
) -> torch.Tensor:  # [batch, heads, query_len, v_head_size]
    """Causal self-attention, as `attend`."""
    if layer.is_plain:
        return _fused(query, key, value, layer.scale, None, is_causal=True, enable_gqa=enable_gqa)
    batch, heads, query_len, _ = query.shape
    out = query.new_empty(batch, heads, query_len, value.shape[3])
    rows = max(_TILE_ROWS // batch, 1)
    for first in range(0, query_len, rows):
        end = min(first + rows, query_len)
        mask = torch.full((end - first, end), -torch.inf).triu_(first + 1)
        seen = key[:, :, :end], value[:, :, :end]
        out[:, :, first:end] = _by_scores(query[:, :, first:end], *seen, layer, sinks, mask)
    return out


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> torch.Tensor:
    size, v_size = query.shape[3], value.shape[3]
    if size == v_size:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Of two sizes there is no fused kernel, and the other one holds all scores at once.
    query, key, value = (_widened(x, max(size, v_size)) for x in (query, key, value))
    return _fused(query, key, value, scale, mask, is_causal=is_causal, enable_gqa=enable_gqa)[..., :v_size]


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros up to `width`: they change no score."""
    return x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))


def _by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: AttentionSpec,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """In float32, in which sums are in the fused kernel too."""
    batch, heads, rows, size = query.shape
    kv_heads, num_tokens = key.shape[1:3]
    grouped = (query.float() * layer.scale).reshape(batch, kv_heads, heads // kv_heads * rows, size)
    scores = (grouped @ key.float().transpose(2, 3)).view(batch, heads, rows, num_tokens)
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = scores.sub_(largest).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sinks - largest).exp()
    attended = weights.view(batch, kv_heads, -1, num_tokens) @ value.float()
    return attended.view(batch, heads, rows, value.shape[3]).to(query.dtype)
