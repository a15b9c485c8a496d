"""How many blocks a request holds at most, against every way in which it could come to its tokens."""

from __future__ import annotations

import msgspec
import pytest

from ringcore.kv_cache.spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LocalAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
)

LONGEST = 16


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype="float32")


def sliding(sliding_window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=sliding_window)


def chunked(chunk_size: int, block_size: int = 4) -> ChunkedAttentionSpec:
    return ChunkedAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype="float32", chunk_size=chunk_size)


def most_blocks_held(spec: LocalAttentionSpec, max_chunk: int, depth: int) -> list[int]:
    """By number of tokens: the most blocks over all ways to schedule chunks and to confirm them, oldest first."""
    most = [0] * (LONGEST + 1)
    seen = set()
    stack: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while stack:
        num_confirmed, in_flight = state = stack.pop()
        num_scheduled = num_confirmed + sum(in_flight)
        if state in seen or num_scheduled > LONGEST:
            continue
        seen.add(state)
        needed = range(spec.first_live_token(num_confirmed), num_scheduled)
        most[num_scheduled] = max(most[num_scheduled], len({token // spec.block_size for token in needed}))
        if in_flight:
            stack.append((num_confirmed + in_flight[0], in_flight[1:]))
        if len(in_flight) < depth:
            stack += [(num_confirmed, (*in_flight, chunk)) for chunk in range(1, max_chunk + 1)]
    return [max(most[: n + 1]) for n in range(LONGEST + 1)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_chunk", [1, 2, 3, 5])
def test_a_window_needs_exactly_the_most_that_a_request_can_hold(max_chunk, depth):
    for block_size in range(1, 6):
        for sliding_window in range(1, 8):
            spec = sliding(sliding_window, block_size)
            needed = [spec.blocks_needed(n, max_chunk * depth) for n in range(LONGEST + 1)]
            assert needed == most_blocks_held(spec, max_chunk, depth), (block_size, sliding_window)
            assert needed == sorted(needed)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_chunk", [1, 2, 3, 5])
def test_chunks_need_what_a_request_can_hold(max_chunk, depth):
    """Exactly its most, where a chunk is of whole blocks or a block of whole chunks; at most one block more, and only
    for long requests, where they cross."""
    for block_size in range(1, 6):
        for chunk_size in range(1, 8):
            spec = chunked(chunk_size, block_size)
            needed = [spec.blocks_needed(n, max_chunk * depth) for n in range(LONGEST + 1)]
            most = most_blocks_held(spec, max_chunk, depth)
            assert needed == sorted(needed)
            over = [n - m for n, m in zip(needed, most, strict=True)]
            assert set(over) <= {0, 1}, (block_size, chunk_size)
            if not chunk_size % block_size or not block_size % chunk_size:
                assert over == [0] * len(over), (block_size, chunk_size)


def test_a_chunk_lives_until_the_next_begins():
    assert [chunked(6).first_live_token(n) for n in (0, 5, 6, 11, 12)] == [0, 0, 6, 6, 12]
    assert (
        chunked(6).blocks_needed(1000, 2) == 3
    )  # the second chunk: positions 6 to 11 and 2 in flight, in blocks 1 to 3


def test_values_of_another_width_count_with_their_own():
    """The expanded heads of DeepSeek's: 192 and 128."""
    spec = FullAttentionSpec(16, 4, 192, "bfloat16", 128)
    assert spec.page_size_bytes == 16 * 4 * (192 + 128) * 2
    assert SlidingWindowSpec(16, 4, 192, "bfloat16", 64, 128).page_size_bytes == spec.page_size_bytes
    assert (spec.value_size, full().value_size) == (128, 8)
    with pytest.raises(AssertionError, match="one way to write a spec"):
        FullAttentionSpec(16, 4, 192, "bfloat16", 192)


def test_a_latent_is_one_row_for_all_heads():
    """Of DeepSeek-V3's 128 heads, 71 times as small as expanded."""
    spec = MLASpec(16, 512, 64, "bfloat16")
    assert spec.page_size_bytes == 16 * 576 * 2
    assert FullAttentionSpec(16, 128, 192, "bfloat16", 128).page_size_bytes // spec.page_size_bytes == 71
    assert [spec.blocks_needed(n, 100) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=KVCacheSpec) == spec


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [
        (1, 1),
        (4, 1),
        (5, 2),
        (9, 3),  # the window of 5 and 2 in flight: at 7 confirmed tokens, 3 to 8
        (13, 3),
        (1000, 3),
    ],
)
def test_a_window_of_five_tokens(num_tokens, num_blocks):
    assert sliding(5).blocks_needed(num_tokens, 2) == num_blocks


def test_a_window_that_begins_with_the_last_slot_of_a_block():
    assert sliding(5).first_live_token(7) == 3  # the token at 7 sees 3, 4, 5, 6 and itself
    assert sliding(5).first_live_token(4) == 0
    assert sliding(5).first_live_token(5) == 1
    assert sliding(1).first_live_token(6) == 6


def test_full_attention_holds_every_token():
    assert [full().blocks_needed(n, 100) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_window_takes_no_more_than_full_attention_and_the_same_while_it_hides_nothing():
    for n in range(40):
        assert sliding(9).blocks_needed(n, 2) <= full().blocks_needed(n, 2)
    assert all(sliding(9).blocks_needed(n, 2) == full().blocks_needed(n, 2) for n in range(10))


def test_bytes_of_a_token():
    """Three layers of 64 bytes a token."""
    assert mixed(8).token_bytes == 3 * 64
    assert mixed(8).of_layers(["layers.2"]).token_bytes == 64


def test_pages():
    assert full().page_size_bytes == sliding(7).page_size_bytes == 2 * 4 * 1 * 8 * 4
    assert msgspec.structs.replace(full(), num_kv_heads=3, dtype="bfloat16").page_size_bytes == 2 * 4 * 3 * 8 * 2


def mixed(num_blocks: int, max_model_len: int = 32) -> KVCacheConfig:
    """A group of two full layers in blocks of 4, and a group of one with a window of 5, 2 tokens in flight."""
    groups = [KVCacheGroup(["layers.0", "layers.1"], full()), KVCacheGroup(["layers.2"], sliding(5))]
    return KVCacheConfig(num_blocks, groups, max_model_len=max_model_len, max_tokens_in_flight=2)


def test_a_block_takes_a_page_in_every_tensor():
    config = mixed(num_blocks=10)
    assert config.num_tensors == 2
    assert config.page_size_bytes == 256
    assert config.block_bytes == 512
    assert config.total_bytes == 5120


def test_the_blocks_of_all_groups_count():
    assert [mixed(10).blocks_needed(n) for n in (1, 4, 5, 8, 9, 12, 13, 32)] == [2, 2, 4, 4, 6, 6, 7, 11]


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens"),
    [(-1, 0), (0, 0), (1, 0), (2, 4), (3, 4), (4, 8), (6, 12), (7, 16), (10, 28), (99, 32)],
)
def test_the_most_tokens_that_blocks_hold(num_blocks, num_tokens):
    config = mixed(10)
    assert config.max_num_tokens(num_blocks) == num_tokens
    assert num_tokens == 32 or config.blocks_needed(num_tokens + 1) > num_blocks
    assert num_tokens == 0 or config.blocks_needed(num_tokens) <= num_blocks


def test_no_more_tokens_than_the_context():
    assert mixed(10, max_model_len=10).max_num_tokens(99) == 10


def test_kinds_keep_apart_on_the_wire():
    table: dict[str, KVCacheSpec] = {"layers.0": full(), "layers.1": sliding(5), "layers.2": chunked(5)}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=dict[str, KVCacheSpec]) == table
    config = mixed(10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=KVCacheConfig) == config
