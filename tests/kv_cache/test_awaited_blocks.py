"""Which blocks are being computed, where several rows may compute the same."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.kv_cache.awaited_blocks import AwaitedBlocks


class Hashed:
    """A row's blocks, a letter each; notes how many of them were hashed."""

    def __init__(self, letters: str) -> None:
        self._letters, self.num_hashed = letters, 0

    def name_of(self, block: int) -> bytes:
        self.num_hashed = max(self.num_hashed, block + 1)
        return self._letters[: block + 1].encode()  # a hash stands for all before it, too


@pytest.fixture
def blocks() -> AwaitedBlocks:
    return AwaitedBlocks(2, Hashed.name_of)


def drop_first(blocks: AwaitedBlocks, row: int, num_blocks: int) -> None:
    blocks.drop_first(np.array([row]), np.array([num_blocks]))


def awaited(blocks: AwaitedBlocks, letters: str) -> str:
    """Of a request's blocks those that are awaited."""
    names = [letters[: end + 1].encode() for end in range(len(letters))]
    return "".join(letter for end, letter in enumerate(letters) if blocks.has(names[: end + 1]))


def test_awaited_until_computed(blocks):
    blocks.add(0, Hashed("abcde"), 2, 5)
    assert awaited(blocks, "abcdef") == "cde"
    for num_blocks, left in ((2, "cde"), (3, "de"), (3, "de"), (5, ""), (9, "")):
        drop_first(blocks, 0, num_blocks)
        assert awaited(blocks, "abcdef") == left
        blocks.check({0: num_blocks})
    blocks.drop(np.array([0]))
    blocks.add(0, Hashed("a"), 0, 1)
    assert awaited(blocks, "abc") == "a"


def test_awaited_as_long_as_one_row_computes_it(blocks):
    blocks.add(0, Hashed("ab"), 0, 2)
    blocks.add(1, Hashed("abc"), 0, 3)
    drop_first(blocks, 0, 1)
    assert awaited(blocks, "abc") == "abc"
    blocks.drop(np.array([1]))
    assert awaited(blocks, "abc") == "b"
    blocks.check({0: 1})
    blocks.drop(np.array([0]))
    assert awaited(blocks, "abc") == ""
    blocks.check({})


def test_blocks_that_differ_are_not_awaited_and_hashed_no_further_than_needed(blocks):
    row = Hashed("abcdefgh")
    blocks.add(0, row, 0, 8)
    assert awaited(blocks, "xbcd") == ""
    assert row.num_hashed == 1
    assert awaited(blocks, "abxd") == "ab"
    assert row.num_hashed == 4


def test_nothing_is_awaited_of_a_row_without_blocks(blocks):
    blocks.add(0, Hashed("abc"), 3, 3)
    drop_first(blocks, 0, 4)
    blocks.drop(np.array([0]))
    blocks.check({})


def test_our_own_bugs_are_noticed(blocks):
    blocks.add(0, Hashed("a"), 0, 1)
    with pytest.raises(AssertionError, match="computed block is awaited"):
        blocks.check({0: 1})
    with pytest.raises(AssertionError, match="not in use"):
        blocks.check({})
