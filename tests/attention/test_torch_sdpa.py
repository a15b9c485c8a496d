"""What is the torch_sdpa backend's own: how it sorts a step, and that its cache stays finite."""

from __future__ import annotations

import numpy as np
import torch

from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.attention.backends.torch_sdpa_plan import Chunk, DecodeBatch, DecodeOne, Prompts
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import FullAttentionSpec

# A block of 16 tokens is 16 KiB, so 16 blocks are as dear as one batch more.
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32")


def metadata(query_lens: list[int], seq_lens: list[int], tables: list[list[int]]) -> AttentionMetadata:
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    return AttentionMetadata(
        num_tokens=sum(query_lens),
        num_seqs=len(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        seq_lens_cpu=np.array(seq_lens, dtype=np.int32),
        block_table_cpu=table,
        slot_mapping=torch.arange(sum(query_lens)),
    )


def blocks_of(n: int, first: int, consecutive: bool) -> list[int]:
    return list(range(first, first + n)) if consecutive else list(range(first + n, first, -1))


def test_decoding_sequences_of_like_length_share_a_batch() -> None:
    """2, 3 and 4 blocks: 3 blocks of padding. 100 blocks: 96 and more of padding for each of them."""
    lens = [30, 48, 1600, 64]
    tables = [blocks_of(-(-n // 16), 200 * i + 1, False) for i, n in enumerate(lens)]
    parts = TorchSdpaBackend(SPEC, 4).plan(metadata([1] * 4, lens, tables))
    long, batch = parts
    assert isinstance(long, DecodeOne)
    assert (long.token, long.context.num_tokens) == (2, 1600)
    assert isinstance(batch, DecodeBatch)
    assert batch.tokens is not None
    assert (batch.tokens.tolist(), batch.num_tokens) == ([0, 1, 3], 64)
    assert batch.mask is not None
    assert (batch.mask == 0).sum(-1).flatten().tolist() == [30, 48, 64]


def test_a_long_sequence_with_consecutive_blocks_is_read_in_place() -> None:
    lens = [400, 400, 400]
    tables = [blocks_of(25, 1, True), blocks_of(25, 100, False), blocks_of(25, 200, False)]
    alone, batch = TorchSdpaBackend(SPEC, 4).plan(metadata([1] * 3, lens, tables))
    assert isinstance(alone, DecodeOne)
    assert (alone.token, alone.context.gather, alone.context.first_slot) == (0, None, 16)
    assert isinstance(batch, DecodeBatch)
    assert batch.mask is None, "equally long"


def test_a_step_of_decoding_alone_needs_no_picking() -> None:
    (batch,) = TorchSdpaBackend(SPEC, 4).plan(metadata([1, 1], [5, 9], [[3], [7]]))
    assert isinstance(batch, DecodeBatch)
    assert batch.tokens is None


def test_neighbouring_prompts_of_one_length_share_a_call() -> None:
    query_lens = [7, 7, 5, 7, 1]
    parts = TorchSdpaBackend(SPEC, 4).plan(metadata(query_lens, [7, 7, 5, 7, 9], [[1], [2], [3], [4], [5]]))
    assert [p for p in parts if isinstance(p, Prompts)] == [Prompts(0, 2, 7), Prompts(14, 1, 5), Prompts(19, 1, 7)]


def test_chunks_share_one_mask_of_bounded_height() -> None:
    query_lens, seq_lens = [600, 3], [1000, 50]
    tables = [blocks_of(63, 1, False), blocks_of(4, 100, True)]
    parts = TorchSdpaBackend(SPEC, 4).plan(metadata(query_lens, seq_lens, tables))
    assert all(isinstance(part, Chunk) for part in parts)
    masks = {id(part.mask): part.mask for part in parts if isinstance(part, Chunk)}
    (mask,) = masks.values()
    assert mask.shape == (256, 1000)
    assert (mask[-1] == 0).all()
    assert (mask[0] == 0).sum() == 1000 - 255


def test_an_overflowing_half_format_leaves_the_cache_finite() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
    backend = TorchSdpaBackend(spec, 1)
    cache = torch.zeros(backend.kv_cache_shape(3), dtype=torch.float16)
    step = metadata([2], [2], [[0]])
    q = torch.ones(2, 1, 8, dtype=torch.float16)
    k = torch.full((2, 1, 8), torch.inf, dtype=torch.float16)
    backend.forward(q, k, -k, cache, step, backend.plan(step), 1.0)
    assert torch.isfinite(cache).all()
    assert cache[0, 0, 0, :2].tolist() == [[65504.0] * 8] * 2
    assert cache[1, 0, 0, :2].tolist() == [[-65504.0] * 8] * 2
