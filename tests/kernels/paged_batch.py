"""Batches for the tests of paged attention: in every slot that nothing may read lies NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.kernels.attention.fp8_rows import to_rows
from ringcore.kernels.attention.page_layout import PageLayout

# Of the largest difference to float32, for numbers near 1. Float32: sums of as many terms in another order. The half
# formats: each weight and each result is rounded once, to 2^-9 (bfloat16) or 2^-12 of itself; both are below 4.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


# The attention of models that ask for more than a softmax of scaled scores.
FEATURED_NAMES = ("gpt-oss", "Gemma 2", "Llama 4", "DeepSeek V3, expanded")
FEATURED = (
    {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "window": 128, "sinks": True},
    {"num_heads": 8, "num_kv_heads": 4, "head_size": 256, "window": 4096, "softcap": 50.0},
    {"num_heads": 40, "num_kv_heads": 8, "head_size": 128, "chunk": 4000},
    {"num_heads": 16, "num_kv_heads": 16, "head_size": 192, "v_head_size": 128},
)


@dataclass
class PagedBatch:
    query: torch.Tensor  # [num_tokens, num_heads, head_size], a slice of a wider product
    kv_cache: torch.Tensor  # see `page_layout`
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    sinks: torch.Tensor  # [num_heads]
    v_head_size: int

    @classmethod
    def make(
        cls,
        lens: list[tuple[int, int]],  # (tokens in the step, all tokens) of each sequence
        *,
        device: torch.device,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        chunk: int | None = None,
        v_head_size: int | None = None,
    ) -> PagedBatch:
        random = torch.Generator(device).manual_seed(len(lens) + sum(n for _, n in lens))
        needed = [-(-seq_len // block_size) for _, seq_len in lens]
        ids = torch.randperm(sum(needed), generator=random, device=device, dtype=torch.int32) + 1
        table = torch.zeros(len(lens), max([1, *needed]), dtype=torch.int32, device=device)
        sizes = (head_size, v_head_size or head_size)
        shape = PageLayout.shape(sum(needed) + 1, num_kv_heads, block_size, *sizes)
        kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        for row, blocks, (query_len, seq_len) in zip(table, ids.split(needed), lens, strict=True):
            row[: len(blocks)] = blocks
            first_query = seq_len - query_len
            first = 0 if window is None else max(0, first_query - window + 1)
            first = first if chunk is None else first_query // chunk * chunk
            positions = torch.arange(first, seq_len, device=device)
            blocks, offsets = row[positions // block_size].long(), positions % block_size
            for kind, size in zip(PageLayout.of(kv_cache, head_size).split(kv_cache), sizes, strict=True):
                numbers = torch.randn(len(positions), num_kv_heads, size, generator=random, device=device)
                kind[blocks, :, offsets] = numbers.to(dtype)
            row[: first // block_size : 2] = 0  # what a window has left behind: an old id, or none
        num_tokens = sum(query_len for query_len, _ in lens)
        fused = torch.randn(num_tokens, num_heads + 2, head_size, generator=random, device=device).to(dtype)
        starts = torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0)
        return cls(
            query=fused[:, :num_heads],
            kv_cache=kv_cache,
            block_table=table,
            seq_lens=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32, device=device),
            query_start_loc=starts.to(torch.int32).to(device),
            scale=head_size**-0.5,
            sinks=torch.randn(num_heads, generator=random, device=device).mul_(3).to(dtype),
            v_head_size=sizes[1],
        )

    def poisoned_out(self) -> torch.Tensor:
        shape = (*self.query.shape[:2], self.v_head_size)
        return torch.full(shape, torch.nan, dtype=self.query.dtype, device=self.query.device)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.isfinite().all(), "the reference read what it may not"
    assert got.isfinite().all()
    difference = (got.float() - expected.float()).abs().max().item()
    assert difference < TOLERANCE[got.dtype], f"largest difference {difference}"


def in_fp8(batch: PagedBatch) -> PagedBatch:
    """Its cache in FP8; what nothing may read has codes that are NaN, and an exponent that is infinite."""
    dense = PageLayout.of(batch.kv_cache, batch.query.shape[2])
    sizes = dense.num_kv_heads, dense.block_size, dense.head_size, dense.v_head_size
    shape = PageLayout.shape(len(batch.kv_cache), *sizes, True)
    pages = torch.full(shape, 255, dtype=torch.uint8, device=batch.query.device)
    page = PageLayout.of(pages, dense.head_size)
    for codes, exponents, given in zip(
        page.split(pages), page.exponents(pages), dense.split(batch.kv_cache), strict=True
    ):
        rows, is_written = to_rows(given), given.isfinite()
        codes[is_written] = rows[..., :-1][is_written]
        exponents[is_written[..., 0]] = rows[..., -1][is_written[..., 0]]
    batch.kv_cache = pages
    return batch
