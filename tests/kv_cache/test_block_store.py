"""The books of a store: what is saved, evicted, pinned by a load, and forgotten, told to the workers in an order that
they can follow."""

from __future__ import annotations

import numpy as np

from ringcore.kv_cache.block_store import BlockStore, block_name

A, B, C, D = (block_name(0, bytes([i]) * 32) for i in range(4))


def told(store: BlockStore) -> tuple[list[bytes], dict[bytes, int]]:
    taken = store.take_transfers()
    store.check()
    return ([], {}) if taken is None else (taken.drops, taken.saves)


def test_names_tell_groups_apart() -> None:
    assert block_name(0, b"h") != block_name(1, b"h")


def test_the_least_recently_used_make_room() -> None:
    store = BlockStore(2, block_bytes=10)
    store.save([A, B], [1, 2])
    assert told(store) == ([], {A: 1, B: 2})
    store.save([A], [3])  # evicted again: it is there already
    assert told(store) == ([], {})
    store.save([C], [4])
    assert told(store) == ([B], {C: 4})
    assert (A in store, B in store, C in store) == (True, False, True)
    assert store.saved_bytes == 30


def test_what_no_worker_has_heard_of_is_not_dropped() -> None:
    store = BlockStore(1, block_bytes=10)
    store.save([A, B], [1, 2])
    assert told(store) == ([], {B: 2})
    store.save([A], [3])
    store.save([B], [4])  # dropped and saved again for one step
    assert told(store) == ([B], {B: 4})


def test_a_load_pins() -> None:
    store = BlockStore(2, block_bytes=10)
    store.save([A, B], [1, 2])
    told(store)
    store.pin(7, [A])
    store.load(7, [A], np.array([5]))
    store.save([C, D], [3, 4])
    taken = store.take_transfers()
    assert taken is not None
    assert (taken.drops, taken.saves) == ([B], {D: 4})
    assert [(number, names, ids.tolist()) for number, names, ids in taken.loads] == [(7, [A], [5])]
    assert (store.load_of(A), store.load_of(D)) == (7, None)
    store.unpin(7, [A], [True])
    assert (A in store, store.load_of(A), store.loaded_bytes) == (True, None, 10)
    store.save([B], [6])
    assert told(store) == ([D], {B: 6})


def test_no_room_beside_loads() -> None:
    store = BlockStore(1, block_bytes=10)
    store.save([A], [1])
    store.pin(0, [A])
    store.save([B], [2])
    assert B not in store
    assert len(store) == 1


def test_what_was_not_loaded_is_forgotten() -> None:
    store = BlockStore(3, block_bytes=10, stored=[A, B])
    store.pin(0, [A, B])
    store.unpin(0, [A, B], [False, True])
    assert (A in store, B in store, store.num_failed_blocks) == (False, True, 1)
    assert told(store) == ([A], {})


def test_what_it_holds_at_the_start_fits() -> None:
    store = BlockStore(1, block_bytes=10, stored=[A, B, C])
    assert told(store) == ([A, B], {})
    assert C in store


def test_a_load_that_was_cleared_brings_nothing() -> None:
    store = BlockStore(3, block_bytes=10, stored=[A, B])
    store.pin(0, [A])
    store.clear()
    assert len(store) == 0
    assert sorted(told(store)[0]) == [A, B]
    store.save([A], [1])
    store.unpin(0, [A], [True])
    assert store.loaded_bytes == 0
    assert told(store) == ([], {A: 1})


def test_new_weights() -> None:
    in_memory, in_files = (
        BlockStore(3, block_bytes=10, stored=[A, B], outlives_engine=outlives) for outlives in (False, True)
    )
    for store in (in_memory, in_files):
        store.weights_changed()
        assert len(store) == 0
        store.save([C], [1])
    assert told(in_memory) == ([A, B], {C: 1})
    assert told(in_files) == ([], {})
