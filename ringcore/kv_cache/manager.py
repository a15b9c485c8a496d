"""The KV cache as the scheduler sees it: room for a request's tokens, and what of its prefix is there already."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from ringcore.kv_cache.block_hash import BlockHasher, token_bytes
from ringcore.kv_cache.block_pool import Block, BlockPool
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["CacheUser", "KVCacheManager"]


class CacheUser(Protocol):
    """What the manager reads and writes of a request; `blocks`, hashes and the published count are its to write."""

    tokens: array[int]  # every known token: the prompt, then what was generated
    num_computed_tokens: int  # scheduled so far: their slots are written, or will be by a step in flight
    num_confirmed_tokens: int  # of these, computed by steps that have come back
    cache_salt: str | None
    blocks: list[Block]  # the block table
    block_hashes: list[bytes]  # of the first full blocks of `tokens`, as far as they were asked for
    num_published_blocks: int  # leading blocks that the prefix cache knows, or knows a twin of


class KVCacheManager:
    """One KV cache group's blocks, and the prefix cache over them.

    `num_blocks` counts the null block. Without `enable_prefix_caching` nothing is hashed and nothing is found.
    `hasher` names the blocks; by default one whose root is random in each process.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, enable_prefix_caching: bool, *, hasher: BlockHasher | None = None
    ) -> None:
        self.spec = spec
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = hasher or BlockHasher(spec.block_size)
        self._pool = BlockPool(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of one request that the whole cache holds."""
        return self.num_usable_blocks * self.spec.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        return self.spec.blocks_needed(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of so many tokens fits while it has the cache to itself."""
        return self.blocks_needed(num_tokens) <= self.num_usable_blocks

    def find_cached_prefix(self, request: CacheUser) -> tuple[list[Block], int]:
        """The longest cached run of whole blocks that the request begins with, and its tokens. Takes no reference.

        It leaves at least one known token out: something has to be computed for there to be a next token.
        """
        if not self.enable_prefix_caching:
            return [], 0
        size = self.spec.block_size
        num_blocks = (len(request.tokens) - 1) // size
        self._hasher.extend(request.block_hashes, request.tokens, num_blocks, request.cache_salt)
        data = token_bytes(request.tokens, 0, num_blocks * size)
        found: list[Block] = []
        for index in range(num_blocks):
            block = self._pool.lookup(request.block_hashes[index], data[4 * size * index : 4 * size * (index + 1)])
            if block is None:
                break
            found.append(block)
        return found, len(found) * size

    def allocate(
        self, request: CacheUser, num_new_tokens: int, cached_blocks: Sequence[Block] = ()
    ) -> list[int] | None:
        """Slots for `num_new_tokens` tokens after the computed ones: the ids of the blocks newly appended.

        `cached_blocks`, from `find_cached_prefix` just before, are put under a request that has no block yet; their
        tokens count as computed. None, and nothing changed, where too few blocks are free.
        """
        assert not (cached_blocks and request.blocks), "a prefix goes under the first block"
        num_tokens = request.num_computed_tokens + len(cached_blocks) * self.spec.block_size + num_new_tokens
        num_new_blocks = self.blocks_needed(num_tokens) - len(request.blocks) - len(cached_blocks)
        if num_new_blocks <= 0 and not cached_blocks:
            return []
        num_revived = sum(block.ref_count == 0 for block in cached_blocks)  # they are in the free list too
        if num_new_blocks + num_revived > self.num_free_blocks:
            return None
        self._pool.touch(cached_blocks)  # before the allocation, which could evict them
        new_blocks = self._pool.allocate(num_new_blocks)
        if cached_blocks:
            request.blocks.extend(cached_blocks)
            request.num_published_blocks = len(cached_blocks)
        request.blocks.extend(new_blocks)
        return [block.id for block in new_blocks]

    def publish(self, request: CacheUser) -> None:
        """Lets others find the request's full blocks, generated tokens too, up to `num_confirmed_tokens`.

        Only confirmed ones: their tokens are known, their slots are written, and no step in flight writes to them
        again, since a step writes at positions that no step before it has computed.
        """
        begin, end = request.num_published_blocks, request.num_confirmed_tokens // self.spec.block_size
        if not self.enable_prefix_caching or end <= begin:
            return
        size = self.spec.block_size
        self._hasher.extend(request.block_hashes, request.tokens, end, request.cache_salt)
        for index in range(begin, end):
            data = token_bytes(request.tokens, index * size, (index + 1) * size)
            self._pool.cache_block(request.blocks[index], request.block_hashes[index], data)
        request.num_published_blocks = end

    def free(self, request: CacheUser) -> None:
        """Takes every block from the request. Published ones stay to be found until their memory is needed."""
        self._pool.free(request.blocks)
        request.blocks.clear()
        request.num_published_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while any block is in use."""
        return self._pool.reset_prefix_cache()

    def check(self, requests: Iterable[CacheUser]) -> None:
        """Recomputes what the pool believes from the block tables of all `requests`."""
        users: Counter[int] = Counter()
        for request in requests:
            ids = [block.id for block in request.blocks]
            assert len(set(ids)) == len(ids), "a block is twice in one block table"
            users.update(ids)
            assert self.blocks_needed(request.num_computed_tokens) <= len(ids), "computed tokens without a slot"
            assert request.num_published_blocks * self.spec.block_size <= request.num_confirmed_tokens, (
                "a block is published before its tokens are confirmed"
            )
        self._pool.check(users)
