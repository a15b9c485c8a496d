"""What is the torch_sdpa backend's own: how it sorts a step, and that its cache stays finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.attention.backends.torch_sdpa_plan import Chunk, DecodeBatch, DecodeOne, Prompts
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec

# A block of 16 tokens is 16 KiB, so 16 blocks are as dear as one batch more.
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
LAYER = AttentionSpec(num_heads=4, scale=0.125)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32", sliding_window=40)


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
    items = TorchSdpaBackend(SPEC, [LAYER]).plan(metadata([1] * 4, lens, tables))
    long, batch = items
    assert isinstance(long, DecodeOne)
    assert (long.token, long.context.num_tokens) == (2, 1600)
    assert isinstance(batch, DecodeBatch)
    assert batch.tokens is not None
    assert (batch.tokens.tolist(), batch.end) == ([0, 1, 3], 64)
    assert batch.mask is not None
    assert (batch.mask == 0).sum(-1).flatten().tolist() == [30, 48, 64]


def test_a_long_sequence_with_consecutive_blocks_is_read_in_place() -> None:
    lens = [400, 400, 400]
    tables = [blocks_of(25, 1, True), blocks_of(25, 100, False), blocks_of(25, 200, False)]
    alone, batch = TorchSdpaBackend(SPEC, [LAYER]).plan(metadata([1] * 3, lens, tables))
    assert isinstance(alone, DecodeOne)
    assert (alone.token, alone.context.gather, alone.context.first_slot) == (0, None, 16)
    assert isinstance(batch, DecodeBatch)
    assert batch.mask is None, "equally long"


def test_a_step_of_decoding_alone_needs_no_picking() -> None:
    (batch,) = TorchSdpaBackend(SPEC, [LAYER]).plan(metadata([1, 1], [5, 9], [[3], [7]]))
    assert isinstance(batch, DecodeBatch)
    assert batch.tokens is None


def test_neighbouring_prompts_of_one_length_share_a_call() -> None:
    query_lens = [7, 7, 5, 7, 1]
    items = TorchSdpaBackend(SPEC, [LAYER]).plan(metadata(query_lens, [7, 7, 5, 7, 9], [[1], [2], [3], [4], [5]]))
    assert [p for p in items if isinstance(p, Prompts)] == [Prompts(0, 2, 7), Prompts(14, 1, 5), Prompts(19, 1, 7)]


def test_chunks_share_one_mask_of_bounded_height() -> None:
    query_lens, seq_lens = [600, 3], [1000, 50]
    tables = [blocks_of(63, 1, False), blocks_of(4, 100, True)]
    items = TorchSdpaBackend(SPEC, [LAYER]).plan(metadata(query_lens, seq_lens, tables))
    assert all(isinstance(item, Chunk) for item in items)
    masks = {id(item.mask): item.mask for item in items if isinstance(item, Chunk)}
    (mask,) = masks.values()
    assert mask.shape == (256, 1000)
    assert (mask[-1] == 0).all()
    assert (mask[0] == 0).sum() == 1000 - 255


def test_a_window_is_read_from_its_first_block_on() -> None:
    """Position 99 sees 60 to 99, the blocks 3 to 6 but for 12 slots; position 79 sees 40 to 79, the blocks 2 to 4."""
    tables = [[0, 0, 0, 9, 8, 5, 6], [0, 2, 15, 16, 17]]
    (batch,) = TorchSdpaBackend(WINDOW, [LAYER]).plan(metadata([1, 1], [100, 80], tables))
    assert isinstance(batch, DecodeBatch)
    assert (batch.first, batch.end) == (8, 52)
    assert batch.mask is not None
    seen = [np.flatnonzero(row == 0) + batch.first for row in batch.mask[:, 0, 0].numpy()]
    assert [(row[0], row[-1], len(row)) for row in seen] == [(12, 51, 40), (8, 47, 40)]
    cache = torch.arange(20.0)[None, None, :, None, None, None].expand(2, 2, 20, 1, 16, 64).contiguous()
    read = batch.gather.read((cache,), 2, 0, 64)[0][0, :, ::16, 0]
    assert read[:, :3].tolist() == [[9, 8, 5], [15, 16, 17]]
    assert read[0, 3] == 6


def test_sequences_at_one_place_in_their_windows_need_no_mask() -> None:
    tables = [[0, 0, 0, 9, 8, 5, 6], [0, 2, 15, 16, 17], [0, 0, 0, 0, 12, 11, 14, 1]]
    batch, chunk = TorchSdpaBackend(WINDOW, [LAYER]).plan(metadata([5, 1, 1], [100, 80, 112], tables))
    assert isinstance(chunk, Chunk)
    assert isinstance(batch, DecodeBatch)
    assert (batch.mask, batch.first, batch.end) == (None, 8, 48)


def test_a_long_window_with_consecutive_blocks_is_read_in_place() -> None:
    wide = SlidingWindowSpec(16, 2, 64, "float32", sliding_window=400)
    (alone,) = TorchSdpaBackend(wide, [LAYER]).plan(metadata([1], [500], [[0] * 6 + blocks_of(26, 70, True)]))
    assert isinstance(alone, DecodeOne)
    # Position 499 sees 100 to 499: from slot 4 of its seventh block on.
    assert (alone.context.gather, alone.context.first_slot, alone.context.num_tokens) == (None, 70 * 16 + 4, 400)


def test_prompts_that_a_window_hides_nothing_of_are_one_call() -> None:
    query_lens = [40, 40, 41]
    items = TorchSdpaBackend(WINDOW, [LAYER]).plan(metadata(query_lens, query_lens, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    whole, tiled = items
    assert whole == Prompts(0, 2, 40)
    assert isinstance(tiled, Chunk)
    assert (tiled.first_token, tiled.query_len, tiled.context) == (80, 41, None)


def test_a_tile_of_a_long_prompt_is_against_its_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 tokens: tiles of 256 rows that see 39 tokens before them, the first one none, the last one of 232 rows."""
    sizes = []
    attend = functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        sizes.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    backend = TorchSdpaBackend(WINDOW, [AttentionSpec(2, 1.0)])
    step = metadata([1000], [1000], [blocks_of(63, 0, True)])
    q = torch.zeros(1000, 2, 64)
    cache = torch.zeros(backend.kv_cache_shape(64))
    backend.forward(q, q, q, cache, step, backend.plan(step), AttentionSpec(2, 1.0))
    assert sizes == [(256, 256), (256, 295), (256, 295), (232, 271)]


def test_an_overflowing_half_format_leaves_the_cache_finite() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
    backend = TorchSdpaBackend(spec, [AttentionSpec(1, 1.0)])
    cache = torch.zeros(backend.kv_cache_shape(3), dtype=torch.float16)
    step = metadata([2], [2], [[0]])
    q = torch.ones(2, 1, 8, dtype=torch.float16)
    k = torch.full((2, 1, 8), torch.inf, dtype=torch.float16)
    backend.forward(q, k, -k, cache, step, backend.plan(step), AttentionSpec(1, 1.0))
    assert torch.isfinite(cache).all()
    assert cache[0, 0, 0, 0, :2].tolist() == [[65504.0] * 8] * 2
    assert cache[1, 0, 0, 0, :2].tolist() == [[-65504.0] * 8] * 2
