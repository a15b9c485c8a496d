"""Prompts are padded bit by bit, with zeros after each."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.attention.prompt_padding import (
    gather_padded_kv,
    gather_padded_kv_reference,
    pad_prompts,
    pad_prompts_reference,
)

pytestmark = pytest.mark.sampled

LENGTHS = [(1, 5, 8), (3, 5, 8), (2, 8, 8), (4, 1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_prompts", "query_len", "padded_len"), LENGTHS)
@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 64), (3, 80), (8, 128)])
def test_rows(device, dtype, num_prompts, query_len, padded_len, num_heads, head_size) -> None:
    torch.manual_seed(0)
    fused = torch.randn(num_prompts * query_len + 1, num_heads + 2, head_size, device=device).to(dtype)
    fused[-1] = float("nan")  # after the last prompt
    rows = fused[:-1, 1:-1]
    padded = pad_prompts(rows, query_len, padded_len)
    assert torch.equal(padded, pad_prompts_reference(rows, query_len, padded_len))
    assert (padded.data_ptr() == rows.data_ptr()) == (padded_len == query_len)
    assert torch.equal(padded[:, :query_len].flatten(0, 1), rows)
    assert not padded[:, query_len:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_prompts", "query_len", "padded_len"), LENGTHS)
@pytest.mark.parametrize(("num_kv_heads", "head_size", "block_size"), [(1, 64, 16), (3, 80, 16), (8, 128, 48)])
def test_pages(device, dtype, num_prompts, query_len, padded_len, num_kv_heads, head_size, block_size) -> None:
    torch.manual_seed(0)
    kv_cache = torch.randn(5, 2, num_kv_heads, block_size, head_size, device=device).to(dtype)
    kv_cache[0] = float("nan")  # the null block
    slots = (torch.randperm(4 * block_size, device=device) + block_size)[: num_prompts * query_len]
    slots[-1] = 5 * block_size - 1
    both = gather_padded_kv(kv_cache, slots, query_len, padded_len, dtype)
    expected = gather_padded_kv_reference(kv_cache, slots, query_len, padded_len, dtype)
    for read, wanted in zip(both, expected, strict=True):
        assert torch.equal(read, wanted)
        assert not read[:, query_len:].any()
