"""How many rows of queries a tile of batch-invariant decode attention may have.

A decode needs tiles of 16 rows, a prompt of 64 and more, which tensor cores multiply by another instruction. Whether
both add up alike is asked of the device: queries whose products with keys cancel, so that a score is what roundings
leave, are attended to by a prompt's kernel and by decodes. Where they differ, decodes take the tiles of prompts.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from ringcore.errors import ConfigError
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
from ringcore.kernels.attention.span_scheduler import SpanTileScheduler, span_tiling
from ringcore.kernels.launch.precompile import NotLaunchedError

__all__ = ["HeadShape", "decode_rows"]

_log = logging.getLogger(__name__)

_ROWS = 16, 64
_FLOAT32_ROWS = (32,)  # as a prompt's: without tensor cores
_TOKENS, _QUERIES = 320, 32  # of the context, and the last of them
_PROGRAMS = 24  # of a decode: few, for their workspace


class HeadShape(NamedTuple):
    """Of the layers of a KV cache group."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    head_size: int
    v_head_size: int
    window: int | None
    chunk: int | None


def decode_rows(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> int:
    """Raises `ConfigError` where no number of rows gives a decode the bits of a prompt."""
    rows = _FLOAT32_ROWS if dtype == torch.float32 else _ROWS
    if device.type != "cuda":  # the interpreter asks BLAS
        return rows[-1]
    try:
        return _agreeing_rows(shape, dtype, device, rows)
    except NotLaunchedError:  # kernel warm-up
        return rows[0]


@functools.cache  # not what it raises
def _agreeing_rows(shape: HeadShape, dtype: torch.dtype, device: torch.device, candidates: tuple[int, ...]) -> int:
    asked = _Question(shape, dtype, device)
    for rows in candidates:
        decoded = [asked.decoded(num_seqs, rows) for num_seqs in (1, _QUERIES)]
        if asked.of_prompt.isnan().any():
            raise NotLaunchedError
        if all(torch.equal(out, asked.of_prompt) for out in decoded):
            _log.info("batch-invariant attention in %s: decodes have tiles of %d rows", dtype, rows)
            return rows
    found = f"{shape.num_heads} heads of {shape.head_size} numbers in {dtype} on {torch.cuda.get_device_name(device)}"
    raise ConfigError(
        f"deterministic=True: {found} are attended to otherwise in a decode than in a prompt; give another dtype, or "
        "deterministic=False",
        option="deterministic",
        value=True,
    )


class _Question:
    """A context and its last tokens' queries, and what a prompt's kernel makes of them, in float32."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype = shape, dtype
        draw = torch.Generator().manual_seed(1)
        order = torch.randperm(shape.head_size, generator=draw)
        half = shape.head_size // 2
        magnitudes = torch.randint(-12, 13, (half,), generator=draw).exp2()
        queries = torch.randn(_QUERIES, shape.num_heads, half, generator=draw) * magnitudes
        keys = torch.randn(_TOKENS, shape.num_kv_heads, half, generator=draw)
        values = torch.randn(_TOKENS, shape.num_kv_heads, shape.v_head_size, generator=draw)
        self._query = torch.cat((queries, -queries), -1)[..., order].to(dtype).to(device)
        num_blocks = -(-_TOKENS // shape.block_size)
        pages = PageLayout.shape(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size, shape.v_head_size)
        self._pages = torch.zeros(pages, dtype=dtype, device=device)
        new = torch.cat((keys, keys), -1)[..., order].to(dtype).to(device), values.to(dtype).to(device)
        slots = torch.arange(_TOKENS, device=device)
        PageLayout.of(self._pages, shape.head_size).write(self._pages, slots, new)
        self._lens = torch.arange(_TOKENS - _QUERIES + 1, _TOKENS + 1, dtype=torch.int32, device=device)
        self._table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
        starts = torch.tensor([0, _QUERIES], dtype=torch.int32, device=device)
        self.of_prompt = self._empty()
        paged_attention_prefill(
            *(self._query, self._pages, self._table, self._lens[-1:], starts, shape.head_size**-0.5),
            max_query_len=None,
            window=shape.window,
            chunk=shape.chunk,
            out=self.of_prompt,
        )

    def _empty(self) -> torch.Tensor:
        size = *self._query.shape[:2], self._shape.v_head_size
        return torch.full(size, torch.nan, device=self._query.device)

    def decoded(self, num_seqs: int, rows: int) -> torch.Tensor:
        """The same by decodes, with the tiles for `num_seqs` sequences and so many rows."""
        shape, out = self._shape, self._empty()
        tiling = span_tiling(num_seqs, max(shape.head_size, shape.v_head_size), self._dtype, rows)
        scheduler = SpanTileScheduler.allocate(
            *(shape.num_heads, shape.num_kv_heads, shape.head_size, tiling, out.device),
            v_head_size=shape.v_head_size,
            window=shape.window,
            chunk=shape.chunk,
            num_programs=_PROGRAMS,
        )
        scheduler.plan(self._lens)
        table = self._table.expand(_QUERIES, -1).contiguous()
        scale = shape.head_size**-0.5
        return paged_attention_decode(self._query, self._pages, table, self._lens, scheduler, scale, out=out)
