"""Block hashes for the prefix cache: a BLAKE2b chain over raw token bytes.

    root ──▶ digest(root, tokens of block 0) ──▶ digest(that, tokens of block 1) ──▶ ...

A digest stands for all tokens up to the end of its block, so equal digests mean equal prefixes. The root is random
in each process unless it is given, for names that outlive a process: no client can prepare two prompts that collide,
or, unless it knows the root, learn tokens from a digest. A cache
salt or an adapter has its own root. A block with a part of an image has the image's hash in its digest.

Of the standard library's hashes with 256 bits, BLAKE2b costs least for blocks of 16 tokens, with or without SHA
instructions: parent and tokens are one compression.
"""

from __future__ import annotations

import os
import struct
import sys
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

__all__ = ["NO_EXTRA_KEYS", "BlockHasher", "ExtraKeys", "block_bytes", "token_bytes"]

_DIGEST_BYTES = 32


class ExtraKeys(NamedTuple):
    """Inputs of a request's keys and values other than its token ids."""

    cache_salt: str | None = None  # requests share blocks only within one salt; an empty string is a salt
    adapter: str | None = None
    # Placeholder tokens of images: (first token, number of tokens, hash of the image), in the order of the tokens.
    item_hashes: tuple[tuple[int, int, bytes], ...] = ()


NO_EXTRA_KEYS = ExtraKeys()


def token_bytes(tokens: np.ndarray, begin: int, end: int) -> bytes:
    """The tokens from `begin` to `end` as int32 in little-endian bytes, 4 a token. `tokens` are int32."""
    part = tokens[begin:end].tobytes()
    return part if sys.byteorder == "little" else np.frombuffer(part, ">i4").astype("<i4").tobytes()


def block_bytes(blocks: np.ndarray) -> bytes:
    """As `token_bytes`, of the tokens of blocks [n, block_size] int32."""
    return token_bytes(blocks.reshape(-1), 0, blocks.size)


class BlockHasher:
    """Hashes full blocks of `block_size` tokens. With the same `seed`, or the same `root` of 32 bytes, the digests are
    the same in every process."""

    def __init__(self, block_size: int, seed: int | None = None, root: bytes | None = None) -> None:
        self.block_size = block_size
        assert root is None or len(root) == _DIGEST_BYTES, "a root is a digest"
        seeded = os.urandom(_DIGEST_BYTES) if seed is None else _digest(f"block hash root {seed}".encode())
        self._root = seeded if root is None else root

    def extend(
        self,
        hashes: list[bytes],
        tokens: np.ndarray,
        num_blocks: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Appends to `hashes` until it names the first `num_blocks` blocks of `tokens`; these must be full.

        `tokens` are int32, extra_keys the same in each call for a request. Tokens are only ever appended to a request,
        so existing hashes stay valid.
        """
        first = len(hashes)
        if num_blocks <= first:
            return
        data = token_bytes(tokens, first * self.block_size, num_blocks * self.block_size)
        assert len(data) == 4 * (num_blocks - first) * self.block_size, "only full blocks have a hash"
        self.append(hashes, data, extra_keys)

    def append(self, hashes: list[bytes], data: bytes, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        """Appends the hashes of the blocks that follow, given their `token_bytes`; extra_keys as in `extend`."""
        first, size = len(hashes), 4 * self.block_size
        if hashes:
            parent = hashes[-1]
        else:
            parent = self._root if extra_keys is NO_EXTRA_KEYS else self._root_of(extra_keys)
        append = hashes.append
        if not extra_keys.item_hashes:
            for begin in range(0, len(data), size):
                parent = blake2b(parent + data[begin : begin + size], digest_size=_DIGEST_BYTES).digest()
                append(parent)
            return
        end = first + len(data) // size
        items = self._item_keys(extra_keys, first, end)
        for block in range(first, end):
            begin = (block - first) * size
            # Parent and tokens have a fixed length: no item can be mistaken for tokens.
            parent = _digest(parent + data[begin : begin + size] + items.get(block, b""))
            append(parent)

    def _root_of(self, extra_keys: ExtraKeys) -> bytes:
        """The root digest. BLAKE2b's personalization separates it from block digests: no salt passes for tokens."""
        if extra_keys.cache_salt is None and extra_keys.adapter is None:
            return self._root
        named = ((b"salt", extra_keys.cache_salt), (b"adapter", extra_keys.adapter))
        parts = [name + _sized(key.encode("utf-8", "surrogatepass")) for name, key in named if key is not None]
        return blake2b(self._root + b"".join(parts), digest_size=_DIGEST_BYTES, person=b"root").digest()

    def _item_keys(self, extra_keys: ExtraKeys, first: int, end: int) -> dict[int, bytes]:
        """By block from `first` to `end`: its items, those with a token in the block, and their offsets in it."""
        keys: dict[int, bytes] = {}
        for first_token, num_tokens, item_hash in extra_keys.item_hashes:
            item_end = -(-(first_token + num_tokens) // self.block_size)
            for block in range(max(first_token // self.block_size, first), min(item_end, end)):
                offset = first_token - block * self.block_size
                keys[block] = keys.get(block, b"") + struct.pack("<q", offset) + _sized(item_hash)
        return keys


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _sized(data: bytes) -> bytes:
    return struct.pack("<q", len(data)) + data
