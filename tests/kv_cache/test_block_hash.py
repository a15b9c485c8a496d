"""Digests name whole prefixes."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from ringcore.kv_cache.block_hash import BlockHasher, token_bytes

TOKENS = array("i", [1, 2, 3, 4, 5, 6, 7, 8, 9])


def hashes(tokens, num_blocks, salt=None, hasher=None) -> list[bytes]:
    result: list[bytes] = []
    (hasher or BlockHasher(4, seed=1)).extend(result, array("i", tokens), num_blocks, salt)
    return result


def test_raw_little_endian_bytes():
    assert token_bytes(array("i", [7, 1, 258, 9]), 1, 3) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_the_chain():
    hasher = BlockHasher(4, seed=1)
    first, second = hashes(TOKENS, 2, hasher=hasher)
    assert second == hashlib.sha256(first + token_bytes(TOKENS, 4, 8)).digest()
    assert second == hasher.digest(first, token_bytes(TOKENS, 4, 8))


def test_extended_as_blocks_fill():
    hasher = BlockHasher(4, seed=1)
    growing: list[bytes] = []
    hasher.extend(growing, TOKENS[:5], 1, "salt")
    hasher.extend(growing, TOKENS[:5], 1, "salt")
    hasher.extend(growing, TOKENS[:8], 2, "salt")
    assert growing == hashes(TOKENS, 2, "salt")
    hasher.extend(growing, TOKENS, 1, "salt")
    assert len(growing) == 2


def test_only_full_blocks():
    with pytest.raises(AssertionError, match="only full blocks"):
        hashes(TOKENS, 3)


def test_an_early_token_changes_every_digest_after_it():
    other = hashes([0, *TOKENS[1:]], 2)
    assert not set(other) & set(hashes(TOKENS, 2))
    later = hashes([*TOKENS[:5], 0, 7, 8], 2)
    assert [a == b for a, b in zip(later, hashes(TOKENS, 2), strict=True)] == [True, False]


def test_salts_differ_in_every_block():
    names = [hashes(TOKENS, 2, salt) for salt in (None, "", "a", "b", "\udcff")]
    assert len({digest for digests in names for digest in digests}) == 10


def test_the_root_is_seeded_or_the_processs_own():
    assert hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3)) == hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3))
    assert hashes(TOKENS, 2, hasher=BlockHasher(4, seed=3)) != hashes(TOKENS, 2, hasher=BlockHasher(4, seed=4))
    assert hashes(TOKENS, 2, hasher=BlockHasher(4)) != hashes(TOKENS, 2, hasher=BlockHasher(4))


def test_seeded_digests_are_stable_across_processes():
    root = hashlib.sha256(b"block hash root 1").digest()
    expected = hashlib.sha256(root + b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4))).digest()
    assert hashes(TOKENS, 1) == [expected]
