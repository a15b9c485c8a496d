"""The references of the decode and the prefill kernel: sequence by sequence, in float32."""

from __future__ import annotations

import torch

from ringcore.kernels.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.page_layout import PageLayout

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
    num_heads, group = query.shape[1], query.shape[1] // page.num_kv_heads
    out = query.new_empty(len(query), num_heads, page.v_head_size) if out is None else out
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = query[starts[sequence] : starts[sequence + 1]].float()
        assert len(rows) <= max_query_len
        if not len(rows) or not seq_len:
            out[starts[sequence] : starts[sequence + 1]] = 0
            continue
        positions = torch.arange(seq_len - len(rows), seq_len)[:, None]
        begins = torch.zeros_like(positions)  # [len(rows), 1]: the first token that each row sees
        if window is not None:
            begins = (positions - window + 1).clamp(min=0)
        elif chunk is not None:
            begins = positions // chunk * chunk
        first = int(begins.min())  # tokens before it must not be read
        blocks = block_table[sequence, : -(-seq_len // page.block_size)].long()
        keys, values = (
            kind[blocks].float().transpose(0, 1).flatten(1, 2)[:, first:seq_len].repeat_interleave(group, 0)
            for kind in page.split(kv_cache)
        )  # [num_heads, seq_len - first, head_size or v_head_size]
        scores = torch.einsum("qhd,hkd->hqk", rows, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        tokens = torch.arange(first, seq_len)
        scores.masked_fill_(((tokens > positions) | (tokens < begins)).to(scores.device), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(rows), 1)), 2)
        weights = scores.softmax(-1)[..., : len(tokens)]
        out[starts[sequence] : starts[sequence + 1]] = torch.einsum("hqk,hkd->qhd", weights, values).to(out.dtype)
    return out


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
