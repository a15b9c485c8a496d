"""Batches for the tests of paged attention: in every slot that nothing may read lies NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the largest difference to float32, for numbers near 1. Float32: sums of as many terms in another order. The half
# formats: each weight and each result is rounded once, to 2^-9 (bfloat16) or 2^-12 of itself; both are below 4.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


@dataclass
class PagedBatch:
    query: torch.Tensor  # [num_tokens, num_heads, head_size], a slice of a wider product
    kv_cache: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float

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
    ) -> PagedBatch:
        random = torch.Generator(device).manual_seed(len(lens) + sum(n for _, n in lens))
        needed = [-(-seq_len // block_size) for _, seq_len in lens]
        ids = torch.randperm(sum(needed), generator=random, device=device, dtype=torch.int32) + 1
        table = torch.zeros(len(lens), max([1, *needed]), dtype=torch.int32, device=device)
        shape = (sum(needed) + 1, 2, num_kv_heads, block_size, head_size)
        kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        for row, blocks, (query_len, seq_len) in zip(table, ids.split(needed), lens, strict=True):
            row[: len(blocks)] = blocks
            first = 0 if window is None else max(0, seq_len - query_len - window + 1)
            positions = torch.arange(first, seq_len, device=device)
            numbers = torch.randn(len(positions), 2, num_kv_heads, head_size, generator=random, device=device)
            kv_cache[row[positions // block_size].long(), :, :, positions % block_size] = numbers.to(dtype)
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
        )

    def poisoned_out(self) -> torch.Tensor:
        return torch.full(self.query.shape, torch.nan, dtype=self.query.dtype, device=self.query.device)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.isfinite().all(), "the reference read what it may not"
    assert got.isfinite().all()
    difference = (got.float() - expected.float()).abs().max().item()
    assert difference < TOLERANCE[got.dtype], f"largest difference {difference}"
