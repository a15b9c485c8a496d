"""The references of the decode and the prefill kernel: sequence by sequence, in float32."""

from __future__ import annotations

import torch

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.page_layout import PageLayout

__all__ = ["paged_attention_decode_reference", "paged_attention_prefill_reference"]


def paged_attention_prefill_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention_prefill`, sequence by sequence, in float32."""
    page = PageLayout.of(kv_cache, query.shape[2])
    out = query.new_empty(*query.shape[:2], page.v_head_size) if out is None else out
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = query[starts[sequence] : starts[sequence + 1]].float()
        assert len(rows) <= max_query_len
        if not len(rows) or not seq_len:
            out[starts[sequence] : starts[sequence + 1]] = 0
            continue
        blocks = block_table[sequence, : -(-seq_len // page.block_size)].long()
        both = page.read(kv_cache, blocks, query.dtype)
        keys, values = (kind.transpose(0, 1).flatten(1, 2)[:, :seq_len] for kind in both)
        masks = {"window": window, "chunk": chunk}
        attended = _attend(rows, keys, values, scale, **masks, softcap=softcap, sinks=sinks)
        out[starts[sequence] : starts[sequence + 1]] = attended.to(out.dtype)
    return out


def _attend(
    rows: torch.Tensor,  # [num_rows, num_heads, head_size]: of the last tokens
    keys: torch.Tensor,  # [num_kv_heads, seq_len, head_size]
    values: torch.Tensor,  # [num_kv_heads, seq_len, v_head_size]
    scale: float,
    *,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [num_rows, num_heads, v_head_size] float32
    num_rows, seq_len = len(rows), keys.shape[1]
    positions = torch.arange(seq_len - num_rows, seq_len, device=rows.device)[:, None]
    begins = torch.zeros_like(positions)  # [num_rows, 1]: the first token that each row sees
    if window is not None:
        begins = (positions - window + 1).clamp(min=0)
    elif chunk is not None:
        begins = positions // chunk * chunk
    first = int(begins.min())  # tokens before it must not be read
    group = rows.shape[1] // len(keys)
    keys, values = (kind[:, first:].float().repeat_interleave(group, 0) for kind in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", rows, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens = torch.arange(first, seq_len, device=rows.device)
    scores.masked_fill_((tokens > positions) | (tokens < begins), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, num_rows, 1)), 2)
    weights = scores.softmax(-1)[..., : len(tokens)]
    return torch.einsum("hqk,hkd->qhd", weights, values)


def paged_attention_decode_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention_decode`; of `tile_scheduler` it uses window and chunk alone."""
    tile_ranges = torch.arange(len(query) + 1, dtype=torch.int32)
    return paged_attention_prefill_reference(
        query,
        kv_cache,
        block_table,
        seq_lens,
        tile_ranges,
        scale,
        max_query_len=1,
        window=tile_scheduler.window,
        chunk=tile_scheduler.chunk,
        softcap=softcap,
        sinks=sinks,
        out=out,
    )
