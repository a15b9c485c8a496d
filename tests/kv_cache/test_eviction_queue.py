"""The order of eviction equals that of an ordered dict."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringcore.kv_cache.eviction_queue import EvictionQueue


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_the_last_place_of_a_block_counts():
    queue = EvictionQueue(8)
    queue.add(ids(3, 1, 2, 1))
    queue.remove(ids(3))
    queue.add(ids(3))
    assert queue.first(3).tolist() == [2, 1, 3]
    assert queue.pop(2).tolist() == [2, 1]
    assert queue.num == 1
    queue.check()
    with pytest.raises(AssertionError, match="not so many"):
        queue.first(2)
    queue.clear()
    assert (queue.num, queue.first(0).tolist()) == (0, [])


def test_as_an_ordered_dict():
    draw, num_blocks = random.Random(0), 40
    queue, model = EvictionQueue(num_blocks), dict[int, None]()
    for _ in range(2000):
        match draw.randrange(3):
            case 0:
                others = [one for one in range(num_blocks) if one not in model]
                added = draw.choices(others, k=draw.randrange(8)) if others else []
                queue.add(ids(*added))
                for one in added:
                    model.pop(one, None)
                    model[one] = None
            case 1:
                removed = draw.sample(list(model), draw.randrange(min(len(model), 5) + 1))
                queue.remove(ids(*removed))
                for one in removed:
                    del model[one]
            case _:
                count = draw.randrange(min(len(model), 4) + 1)
                popped = list(model)[:count]
                assert queue.pop(count).tolist() == popped
                for one in popped:
                    del model[one]
        assert queue.num == len(model)
        assert queue.first(queue.num).tolist() == list(model)
    queue.check()
