"""KV cache specs of layers, and the planned cache: plain data that the control and device columns share.

Block = a logical run of `block_size` tokens. Page = one block's bytes in one layer. Slot = one token's place.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection

import msgspec

__all__ = [
    "DTYPE_BYTES",
    "ChunkedAttentionSpec",
    "FullAttentionSpec",
    "HeadsSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "LocalAttentionSpec",
    "MLASpec",
    "SlidingWindowSpec",
]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """One layer's cache on one rank: keys and values of every token. `dtype`, in which they are given and attended to,
    is a name of `DTYPE_BYTES`; they are stored in it, or with `is_fp8` as `_row_bytes` says."""

    block_size: int
    num_kv_heads: int
    head_size: int  # of keys
    dtype: str
    v_head_size: int | None = None  # of values, where it is another; None: head_size
    is_fp8: bool = False

    def __post_init__(self) -> None:
        assert self.v_head_size != self.head_size, "one way to write a spec: layers of equal ones are a group"

    @property
    def value_size(self) -> int:
        """Numbers of a head's value."""
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def key_bytes(self) -> int:
        """Of a token's key in one head, as it is stored."""
        return _row_bytes(self, self.head_size)

    @property
    def page_size_bytes(self) -> int:
        return _page_size_bytes(self)

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class SlidingWindowSpec(msgspec.Struct, frozen=True, tag="sliding_window", forbid_unknown_fields=True):
    """As `FullAttentionSpec`, for a window: a token attends to itself and the sliding_window - 1 before it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int
    v_head_size: int | None = None
    is_fp8: bool = False

    def __post_init__(self) -> None:
        assert self.v_head_size != self.head_size, "see FullAttentionSpec"

    @property
    def value_size(self) -> int:
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def key_bytes(self) -> int:
        """Of a token's key in one head, as it is stored."""
        return _row_bytes(self, self.head_size)

    @property
    def page_size_bytes(self) -> int:
        return _page_size_bytes(self)

    @property
    def most_seen(self) -> int:
        """The most tokens that a token attends to, itself included."""
        return self.sliding_window

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens.

        The confirmed tokens in the next token's window, and `max_tokens_in_flight` tokens after these: contiguous slots
        that may begin with the last slot of a block, after block_size - 1 slots before the window.
        """
        num_live = self.sliding_window - 1 + max_tokens_in_flight
        return -(-min(num_tokens, self.block_size - 1 + num_live) // self.block_size)

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token in the window of a token at position `num_computed_tokens`."""
        return max(num_computed_tokens - self.sliding_window + 1, 0)


class ChunkedAttentionSpec(msgspec.Struct, frozen=True, tag="chunked", forbid_unknown_fields=True):
    """As `FullAttentionSpec`, in chunks: a token attends to itself and those before it in its chunk. Chunk i has the
    positions i * chunk_size to (i + 1) * chunk_size - 1, of the text; a chunk of a prefill is something else."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    chunk_size: int
    v_head_size: int | None = None
    is_fp8: bool = False

    def __post_init__(self) -> None:
        assert self.v_head_size != self.head_size, "see FullAttentionSpec"

    @property
    def value_size(self) -> int:
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def key_bytes(self) -> int:
        """Of a token's key in one head, as it is stored."""
        return _row_bytes(self, self.head_size)

    @property
    def page_size_bytes(self) -> int:
        return _page_size_bytes(self)

    @property
    def most_seen(self) -> int:
        """The most tokens that a token attends to, itself included."""
        return self.chunk_size

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens.

        The confirmed tokens of the next token's chunk, at most all but one, and `max_tokens_in_flight` after these. A
        chunk begins at a multiple of gcd(chunk_size, block_size) slots of a block.
        """
        num_live = self.chunk_size - 1 + max_tokens_in_flight
        num_before = self.block_size - math.gcd(self.chunk_size, self.block_size)
        return -(-min(num_tokens, num_before + num_live) // self.block_size)

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token in the chunk of a token at position `num_computed_tokens`."""
        return num_computed_tokens // self.chunk_size * self.chunk_size


class MLASpec(msgspec.Struct, frozen=True, tag="latent", forbid_unknown_fields=True):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): of every token one row for all heads, the same on every rank.
    It has the normalised latent, of which keys and values of all heads are linear functions, then the part of the key
    that is rotated and that all heads share."""

    block_size: int
    kv_lora_rank: int  # numbers of the latent
    qk_rope_head_dim: int  # of the rotated part
    dtype: str

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_size(self) -> int:
        """Numbers of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_fp8(self) -> bool:
        return False

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.head_size * DTYPE_BYTES[self.dtype]

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


# A token does not attend to all before it: blocks of those that no later token attends to are freed.
LocalAttentionSpec = SlidingWindowSpec | ChunkedAttentionSpec
HeadsSpec = FullAttentionSpec | LocalAttentionSpec  # keys and values of heads
KVCacheSpec = HeadsSpec | MLASpec


def _page_size_bytes(spec: HeadsSpec) -> int:
    token_bytes = spec.key_bytes + _row_bytes(spec, spec.value_size)  # in one head
    return spec.block_size * spec.num_kv_heads * token_bytes


def _row_bytes(spec: HeadsSpec, size: int) -> int:
    """Of a key or value of `size` numbers: in FP8 a byte each, and one for the power of 2 that scales them."""
    return size + 1 if spec.is_fp8 else size * DTYPE_BYTES[spec.dtype]


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table: the same spec, the same blocks."""

    layer_names: list[str]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of every rank, planned at start-up; of one with a part of the layers by `of_layers`. Block 0 is the
    null block: never allocated, never attended to.

    All groups have pages of one size and take their blocks from one pool: layer i of every group has its pages in
    tensor i, each group in its own blocks.
    """

    num_blocks: int
    groups: list[KVCacheGroup]
    max_model_len: int  # tokens: the most that one request may have
    max_tokens_in_flight: int  # the most scheduled, unconfirmed tokens of one request

    def of_layers(self, names: Collection[str]) -> KVCacheConfig:
        """The cache of a rank with these layers alone: the same groups and blocks, of which it stores its layers'."""
        groups = [
            KVCacheGroup([name for name in group.layer_names if name in names], group.spec) for group in self.groups
        ]
        return msgspec.structs.replace(self, groups=groups)

    @property
    def num_tensors(self) -> int:
        return max(len(group.layer_names) for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        return self.groups[0].spec.page_size_bytes

    @property
    def block_bytes(self) -> int:
        """Memory of one block: a page in every tensor, even if a short group leaves the last ones unused."""
        return self.num_tensors * self.page_size_bytes

    @property
    def token_bytes(self) -> int:
        """Memory of one token that every layer has in its cache."""
        return sum(
            len(group.layer_names) * group.spec.page_size_bytes // group.spec.block_size for group in self.groups
        )

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_needed(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that one request holds until it has `num_tokens` tokens.

        Start-up, the fitting of max_model_len, admission and the scheduler all decide by this function.
        """
        return sum([group.spec.blocks_needed(num_tokens, self.max_tokens_in_flight) for group in self.groups])

    def max_num_tokens(self, num_blocks: int) -> int:
        """The most tokens, up to max_model_len, of one request that holds at most `num_blocks` blocks."""
        return bisect.bisect_right(range(1, self.max_model_len + 1), num_blocks, key=self.blocks_needed)
