"""Which blocks are being computed, where several rows may compute the same."""

from __future__ import annotations

import pytest

from ringcore.kv_cache.awaited_blocks import AwaitedBlocks


def awaited(blocks: AwaitedBlocks) -> str:
    return "".join(name for name in "abcdef" if name.encode() in blocks)


def test_awaited_until_computed():
    blocks = AwaitedBlocks()
    blocks.add(0, 2, [b"c", b"d", b"e"])
    assert awaited(blocks) == "cde"
    for num_blocks, left in ((2, "cde"), (3, "de"), (3, "de"), (5, ""), (9, "")):
        blocks.drop_first(0, num_blocks)
        assert awaited(blocks) == left
        blocks.check({0: num_blocks})
    blocks.drop(0)
    blocks.add(0, 0, [b"a"])
    assert awaited(blocks) == "a"


def test_awaited_as_long_as_one_row_computes_it():
    blocks = AwaitedBlocks()
    blocks.add(0, 0, [b"a", b"b"])
    blocks.add(1, 0, [b"a", b"b", b"c"])
    blocks.drop_first(0, 1)
    assert awaited(blocks) == "abc"
    blocks.drop(1)
    assert awaited(blocks) == "b"
    blocks.check({0: 1})
    blocks.drop(0)
    assert awaited(blocks) == ""
    blocks.check({})


def test_nothing_is_awaited_of_a_row_without_blocks():
    blocks = AwaitedBlocks()
    blocks.add(0, 3, [])
    blocks.drop_first(0, 4)
    blocks.drop(0)
    blocks.check({})


def test_our_own_bugs_are_noticed():
    blocks = AwaitedBlocks()
    blocks.add(0, 0, [b"a"])
    with pytest.raises(AssertionError, match="computed block is awaited"):
        blocks.check({0: 1})
    with pytest.raises(AssertionError, match="not in use"):
        blocks.check({})
