"""Digests name whole prefixes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ringcore.kv_cache.block_hash import NO_EXTRA_KEYS, BlockHasher, ExtraKeys, token_bytes

TOKENS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32)


def hashes(tokens, num_blocks, extra_keys=NO_EXTRA_KEYS, hasher=None) -> list[bytes]:
    result: list[bytes] = []
    (hasher or BlockHasher(4, seed=1)).extend(result, np.array(tokens, np.int32), num_blocks, extra_keys)
    return result


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def test_raw_little_endian_bytes():
    assert token_bytes(np.array([7, 1, 258, 9], np.int32), 1, 3) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert token_bytes(np.array([7, 1, 258, 9], np.int32), 1, 3) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_the_chain():
    first, second = hashes(TOKENS, 2)
    assert second == blake2b(first + token_bytes(TOKENS, 4, 8))


def test_seeded_digests_are_stable_across_processes():
    root = blake2b(b"block hash root 1")
    assert hashes(TOKENS, 1) == [blake2b(root + b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4)))]
    assert hashes(TOKENS, 1)[0].hex().startswith("6ac283ac")


def test_extended_as_blocks_fill():
    hasher, keys = BlockHasher(4, seed=1), ExtraKeys("salt")
    growing: list[bytes] = []
    hasher.extend(growing, TOKENS[:5], 1, keys)
    hasher.extend(growing, TOKENS[:5], 1, keys)
    hasher.extend(growing, np.array(TOKENS[:8], np.int32), 2, keys)
    assert growing == hashes(TOKENS, 2, keys)
    hasher.extend(growing, TOKENS, 1, keys)
    assert len(growing) == 2


def test_only_full_blocks():
    with pytest.raises(AssertionError, match="only full blocks"):
        hashes(TOKENS, 3)


def test_an_early_token_changes_every_digest_after_it():
    other = hashes([0, *TOKENS[1:]], 2)
    assert not set(other) & set(hashes(TOKENS, 2))
    later = hashes([*TOKENS[:5], 0, 7, 8], 2)
    assert [a == b for a, b in zip(later, hashes(TOKENS, 2), strict=True)] == [True, False]


def test_salts_and_adapters_differ_in_every_block():
    keys = [ExtraKeys(salt) for salt in (None, "", "a", "b", "\udcff")]
    keys += [ExtraKeys(adapter=adapter) for adapter in ("", "a", "b")]
    keys += [ExtraKeys("a", "b"), ExtraKeys("b", "a"), ExtraKeys("ab", ""), ExtraKeys("", "ab")]
    assert len({digest for key in keys for digest in hashes(TOKENS, 2, key)}) == 2 * len(keys)


def test_a_salt_cannot_stand_for_tokens():
    """The root of this salt would be the digest of a first block that holds the same bytes."""
    hasher = BlockHasher(4, seed=1)
    data = b"salt" + (4).to_bytes(8, "little") + b"abcd"
    block = np.frombuffer(data, np.int32)
    assert len(block) == 4
    assert hashes([*block, *TOKENS], 2, hasher=hasher)[1] != hashes(TOKENS, 1, ExtraKeys("abcd"), hasher)[0]


def test_an_image_is_in_each_block_that_shows_it_and_by_the_chain_in_those_after():
    plain = hashes(range(16), 4)
    cat, dog = (hashes(range(16), 4, ExtraKeys(item_hashes=((5, 4, image),))) for image in (b"cat", b"dog"))
    assert [a == b for a, b in zip(cat, plain, strict=True)] == [True, False, False, False]
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [True, False, False, False]
    root = plain[0]
    one, two, _ = cat[1:]
    offsets = [offset.to_bytes(8, "little", signed=True) for offset in (1, -3)]
    sized = (3).to_bytes(8, "little") + b"cat"
    tokens = np.arange(16, dtype=np.int32)
    assert one == blake2b(root + token_bytes(tokens, 4, 8) + offsets[0] + sized)
    assert two == blake2b(one + token_bytes(tokens, 8, 12) + offsets[1] + sized)


def test_images_hashed_piece_by_piece():
    keys = ExtraKeys("salt", "adapter", ((1, 2, b"a"), (3, 9, b"b"), (13, 1, b"c")))
    hasher, growing, tokens = BlockHasher(4, seed=1), [], np.arange(16, dtype=np.int32)
    for num_blocks in range(5):
        hasher.extend(growing, tokens, num_blocks, keys)
    assert growing == hashes(range(16), 4, keys)
    moved = ExtraKeys("salt", "adapter", ((1, 2, b"a"), (3, 9, b"b"), (14, 1, b"c")))
    assert [a == b for a, b in zip(growing, hashes(range(16), 4, moved), strict=True)] == [True, True, True, False]


def test_the_root_is_seeded_or_the_processs_own():
    assert hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3)) == hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3))
    assert hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3)) != hashes(TOKENS, 2, hasher=BlockHasher(4, seed=4))
    assert hashes(TOKENS, 2, hasher=BlockHasher(4)) != hashes(TOKENS, 2, hasher=BlockHasher(4))
