"""The sizes of graphs: ascending, each once, up to the largest step."""

from __future__ import annotations

import pytest

from ringcore.worker.runner.graph_capture import graph_sizes, mixed_sizes


def test_decoding_sizes_by_hand() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(70) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]
    assert graph_sizes(256)[-8:] == [56, 64, 96, 128, 160, 192, 224, 256]
    assert graph_sizes(400)[-4:] == [256, 320, 384, 400]


def test_mixed_sizes_by_hand() -> None:
    assert mixed_sizes(9) == [9]
    assert mixed_sizes(16) == [16]
    assert mixed_sizes(100) == [16, 32, 64, 100]
    largest = [16, 32, 64, 128, 192, 256, 384, 512]
    assert mixed_sizes(512) == largest
    assert mixed_sizes(513) == [*largest, 513]
    assert mixed_sizes(8192) == mixed_sizes(2048)
    assert mixed_sizes(2048)[-3:] == [1664, 1792, 2048]


@pytest.mark.parametrize("sizes", [graph_sizes, mixed_sizes])
def test_each_is_there_once(sizes) -> None:
    """A size that came twice would be counted twice among those that are missing."""
    for most in range(1, 1200):
        found = sizes(most)
        assert found == sorted(set(found))
