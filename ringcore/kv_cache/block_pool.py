"""The blocks of the KV cache: which are free, who shares which, and which can be found again by their tokens.

A block is in one of three states:

    state         ref_count  hash   in the free list
    in use        >= 1       any    no                 its tokens belong to running requests
    cached, free  0          set    yes, at the back   nobody's, but a prompt that begins alike can take it up again
    empty, free   0          None   yes, at the front  nobody's

The free list is handed out from the front. Blocks without a hash come first, the most recently freed one foremost (its
memory is warm); then the cached ones, the longest unused foremost. So a prefix is forgotten only when nothing else is
left, and then the least recently used one, its last block first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["Block", "BlockPool"]


class Block:
    """One block. `token_bytes` are the tokens it is cached for, as raw int32; set exactly if `hash` is."""

    __slots__ = ("hash", "id", "next", "prev", "ref_count", "token_bytes")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.token_bytes: bytes | None = None
        self.prev = self.next = self  # its neighbours in the free list; itself while it is in none

    def __repr__(self) -> str:
        return f"Block({self.id}, ref_count={self.ref_count}, {'cached' if self.hash else 'not cached'})"


class _FreeList:
    """A doubly linked ring through the blocks themselves, so that any block leaves it in O(1)."""

    def __init__(self) -> None:
        self._ends = Block(0)  # stands between the last and the first, and is never handed out
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        """From the front to the back; the links are checked on the way."""
        block = self._ends.next
        while block is not self._ends:
            assert block.next.prev is block, "free list: broken link"
            yield block
            block = block.next

    def push_front(self, block: Block) -> None:
        self._insert_after(self._ends, block)

    def push_back(self, block: Block) -> None:
        self._insert_after(self._ends.prev, block)

    def pop_front(self) -> Block:
        block = self._ends.next
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        assert block.next is not block, f"{block} is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._len -= 1

    def _insert_after(self, before: Block, block: Block) -> None:
        assert block.next is block, f"{block} is in the free list already"
        block.prev, block.next = before, before.next
        block.prev.next = block.next.prev = block
        self._len += 1


class BlockPool:
    """All blocks, by id. Block 0 is the null block: it pads block tables and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool has the null block and at least one more"
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = _FreeList()
        for block in self._blocks[1:]:
            self._free.push_back(block)
        self._cached: dict[bytes, Block] = {}

    @property
    def num_usable_blocks(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[Block]:
        """`num_blocks` blocks with one reference each; at most `num_free_blocks`. Evicts cached ones as needed."""
        assert num_blocks <= self.num_free_blocks, "allocate: not so many blocks are free"
        blocks = [self._free.pop_front() for _ in range(num_blocks)]
        for block in blocks:
            if block.hash is not None:
                self._forget(block)
            block.ref_count = 1
        return blocks

    def free(self, blocks: Sequence[Block]) -> None:
        """Gives back one reference to each, the last block first, so that a prefix outlives its tail."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is freed once too often"
            block.ref_count -= 1
            if block.ref_count == 0 and block.hash is None:
                self._free.push_front(block)
            elif block.ref_count == 0:
                self._free.push_back(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Takes one reference to each; a cached free block leaves the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def cache_block(self, block: Block, block_hash: bytes, block_token_bytes: bytes) -> None:
        """Lets `lookup` find a block in use. Where another block has the hash already, that one stays the one found."""
        assert block.ref_count > 0, f"{block} is free: what it holds may be anything"
        assert block.hash is None, f"{block} is cached already"
        if block_hash in self._cached:
            return
        block.hash, block.token_bytes = block_hash, block_token_bytes
        self._cached[block_hash] = block

    def lookup(self, block_hash: bytes, block_token_bytes: bytes) -> Block | None:
        """The block cached under the hash, if it holds exactly these tokens. For what is before it the hash vouches."""
        block = self._cached.get(block_hash)
        if block is None or block.token_bytes != block_token_bytes:
            return None
        return block

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing done, while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in list(self._cached.values()):
            self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        assert block.hash is not None
        del self._cached[block.hash]
        block.hash = block.token_bytes = None

    def check(self, ref_counts: dict[int, int]) -> None:
        """Recomputes every derived count. `ref_counts`: how many block tables hold each block id."""
        free = list(self._free)
        free_ids = {block.id for block in free}
        assert len(free) == len(free_ids) == self.num_free_blocks, "free list: a block twice, or a wrong count"
        assert 0 not in free_ids | ref_counts.keys(), "the null block is handed out"
        for block in self._blocks[1:]:
            assert block.ref_count == ref_counts.get(block.id, 0), f"{block}: {ref_counts.get(block.id, 0)} users"
            assert (block.id in free_ids) == (block.ref_count == 0), f"{block}: free list and ref count disagree"
            assert (block.hash is None) == (block.token_bytes is None), f"{block}: a hash without tokens"
        cached = [block.hash is not None for block in free]
        assert cached == sorted(cached), "free list: a cached block before one that holds nothing"
        hashed = {block.hash: block for block in self._blocks if block.hash is not None}
        assert hashed == self._cached, "prefix cache: map and blocks disagree"
