"""Names blocks by what they hold: a SHA-256 chain over raw token bytes.

    root ──▶ digest(root, tokens of block 0, salt) ──▶ digest(that, tokens of block 1) ──▶ ...

A digest stands for all tokens up to the end of its block, so equal digests mean equal prefixes. The root is random
in each process unless seeded: nobody outside can prepare two prompts that collide, or tell from a digest what it names.
"""

from __future__ import annotations

import hashlib
import os
import sys
from array import array

__all__ = ["BlockHasher", "token_bytes"]


def token_bytes(tokens: array[int], begin: int, end: int) -> bytes:
    """The tokens from `begin` to `end` as int32 in little-endian bytes, 4 a token. `tokens` is an array('i')."""
    part = tokens[begin:end]
    if sys.byteorder == "big":
        part.byteswap()
    return part.tobytes()


class BlockHasher:
    """Hashes full blocks of `block_size` tokens. With the same `seed` the digests are the same in every process."""

    def __init__(self, block_size: int, seed: int | None = None) -> None:
        self.block_size = block_size
        self._root = os.urandom(32) if seed is None else hashlib.sha256(f"block hash root {seed}".encode()).digest()

    def digest(self, parent: bytes, block_token_bytes: bytes, extra_key: bytes = b"") -> bytes:
        """The name of a block after `parent` (32 bytes).

        The first two parts have a fixed length, so no extra key can be mistaken for tokens.
        """
        return hashlib.sha256(parent + block_token_bytes + extra_key).digest()

    def extend(self, hashes: list[bytes], tokens: array[int], num_blocks: int, cache_salt: str | None) -> None:
        """Appends to `hashes` until it names the first `num_blocks` blocks of `tokens`; these must be full.

        Tokens are only ever appended to a request, so the hashes that are there stay right. The salt goes into the
        first block alone, and through the chain into all: requests share blocks only within one salt.
        """
        begin, size = len(hashes), 4 * self.block_size
        data = token_bytes(tokens, begin * self.block_size, num_blocks * self.block_size)
        assert len(data) == max(num_blocks - begin, 0) * size, "only full blocks have a hash"
        for offset in range(0, len(data), size):
            parent, extra_key = (hashes[-1], b"") if hashes else (self._root, _salt_key(cache_salt))
            hashes.append(self.digest(parent, data[offset : offset + size], extra_key))


def _salt_key(cache_salt: str | None) -> bytes:
    """An empty salt is a salt; none at all is not."""
    return b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
