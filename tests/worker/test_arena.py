"""Arenas over devices that can be looked into: fakes behind the drivers' interfaces, and the CPU's own."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from device_kinds import DEVICES, PAGE, make_device
from fake_virtual_memory import FakeDevice, FakeVirtualMemory, Misuse, view

from ringcore.errors import CapacityError
from ringcore.worker.memory import arena as arena_module
from ringcore.worker.memory.arena import ALIGNMENT, Arena, VirtualMemory
from ringcore.worker.memory.device_memory import ArenaMemory, PlainMemory


@pytest.fixture(params=DEVICES)
def both(request: pytest.FixtureRequest) -> tuple[FakeDevice, VirtualMemory]:
    return make_device(request.param, 64)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> FakeDevice:
    """The one behind `memory`, or one that is its own memory where the test does not ask for that."""
    if "both" in request.fixturenames:
        return request.getfixturevalue("both")[0]
    return FakeVirtualMemory(64 * PAGE)


@pytest.fixture
def memory(both: tuple[FakeDevice, VirtualMemory]) -> VirtualMemory:
    return both[1]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MIN_PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(arena_module, "_MAX_PIECE_BYTES", 4 * PAGE)
    monkeypatch.setattr(arena_module, "_SMALL_SHARE", 2)


@pytest.fixture
def arena(device: FakeVirtualMemory, memory: VirtualMemory) -> Iterator[Arena]:
    arena = Arena("weights", 32 * PAGE, memory, view)
    yield arena
    arena.close()
    device.check_nothing_left()


def pieces(device: FakeVirtualMemory) -> list[int]:
    """Their sizes in pages, in the order of their addresses."""
    return [device.mapped[address][0] // PAGE for address in sorted(device.mapped)]


def test_tensors_are_apart_and_aligned(arena: Arena, device: FakeVirtualMemory) -> None:
    tensors = [arena.allocate(size) for size in (1, 0, 255, 256, 257, 3 * PAGE, 5)]
    for value, tensor in enumerate(tensors):
        device.check_access(tensor)
        assert tensor.dtype == torch.uint8
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(value)
    assert [len(tensor) for tensor in tensors] == [1, 0, 255, 256, 257, 3 * PAGE, 5]
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))
    assert arena.used_bytes <= arena.mapped_bytes <= arena.capacity


def test_views_of_other_dtypes(arena: Arena) -> None:
    tensor = arena.allocate(24).view(torch.float32).view(2, 3)
    tensor.copy_(torch.arange(6.0).view(2, 3))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_large_tensor_has_pieces_of_its_size(arena: Arena, device: FakeDevice, memory: VirtualMemory) -> None:
    """One where nothing is gained by several."""
    large = arena.allocate(9 * PAGE - 100)
    nine = [4, 4, 1] if memory.waits_to_create else [9]
    assert pieces(device) == nine
    larger = arena.allocate(12 * PAGE)  # of which a hundred bytes, less the alignment, are there
    assert pieces(device) == [*nine, *([4, 4, 4] if memory.waits_to_create else [12])]
    assert arena.mapped_bytes == 21 * PAGE
    for tensor in (large, larger):
        device.check_access(tensor)
        tensor.fill_(3)
        assert int(tensor.sum(dtype=torch.int64)) == 3 * len(tensor)


def test_a_huge_tensor_has_few_pieces(
    device: FakeDevice, memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not memory.waits_to_create:
        pytest.skip("it has one piece there")
    monkeypatch.setattr(arena_module, "_LARGE_SHARE", 3)
    arena = Arena("weights", 64 * PAGE, memory, view)
    arena.allocate(10 * PAGE)
    arena.allocate(20 * PAGE)
    assert pieces(device) == [4, 4, 2, 10, 10]
    arena.close()


def test_small_tensors_share_pieces_that_grow(arena: Arena, device: FakeVirtualMemory) -> None:
    for _ in range(60):
        arena.allocate(PAGE // 2)
    assert pieces(device) == [2, 2, 2, 3, 4, 4, 4, 4, 4, 3]  # the last one is what was left
    assert arena.used_bytes == 30 * PAGE


def test_the_capacity_is_the_end(arena: Arena, device: FakeVirtualMemory) -> None:
    arena.allocate(31 * PAGE)
    arena.allocate(PAGE)
    assert arena.mapped_bytes == sum(pieces(device)) * PAGE == 32 * PAGE
    with pytest.raises(CapacityError, match=r"weights: .* do not fit into an arena") as error:
        arena.allocate(1)
    assert error.value.details["available_bytes"] == 0


def test_more_than_the_device_has(memory: VirtualMemory, device: FakeVirtualMemory) -> None:
    arena = Arena("kv_cache", 100 * PAGE, memory, view)
    first = arena.allocate(40 * PAGE)
    first.fill_(1)
    before = pieces(device)
    with pytest.raises(CapacityError, match=r"kv_cache: to grow it needs .* are free; .* asked") as error:
        arena.allocate(30 * PAGE)
    assert error.value.details == {"needed_bytes": 30 * PAGE, "available_bytes": 24 * PAGE}
    assert pieces(device) == before
    assert device.free_bytes == 24 * PAGE
    assert bool((arena.allocate(10 * PAGE).fill_(2) == 2).all())
    assert bool((first == 1).all())
    arena.close()
    device.check_nothing_left()


def test_memory_goes_and_comes_back_at_the_same_addresses(
    arena: Arena, device: FakeVirtualMemory, memory: VirtualMemory
) -> None:
    tensors = [arena.allocate(size) for size in (100, 5 * PAGE, 300)]
    for tensor in tensors:
        tensor.fill_(7)
    device.launch(tensors[1])
    free, mapped = device.free_bytes, arena.mapped_bytes
    arena.unmap()
    arena.unmap()
    assert (arena.mapped_bytes, arena.is_mapped) == (0, False)
    assert device.free_bytes == free + mapped
    for tensor in tensors:
        with pytest.raises(Misuse, match="no memory behind it"):
            device.check_access(tensor)
    with pytest.raises(AssertionError, match="is not mapped"):
        arena.allocate(1)
    other = Arena("another tenant", 60 * PAGE, memory, view)
    other.allocate(50 * PAGE).fill_(9)
    other.close()
    arena.map()
    arena.map()
    assert (arena.mapped_bytes, arena.is_mapped, device.free_bytes) == (mapped, True, free)
    for value, tensor in enumerate(tensors):
        device.check_access(tensor)
        tensor.fill_(value)
    assert [int(tensor[-1]) for tensor in tensors] == [0, 1, 2]
    arena.allocate(7 * PAGE)


def test_where_there_is_no_room_map_takes_nothing(arena: Arena, device: FakeVirtualMemory) -> None:
    tensors = [arena.allocate(size * PAGE) for size in (4, 8, 6)]
    arena.unmap()
    tenant = device.create(48 * PAGE)
    free = device.free_bytes
    with pytest.raises(CapacityError, match=r"weights: to be mapped again it needs") as error:
        arena.map()
    assert error.value.details == {"needed_bytes": 18 * PAGE, "available_bytes": free}
    assert (device.free_bytes, arena.mapped_bytes) == (free, 0)
    device.release(tenant)
    arena.map()
    for tensor in tensors:
        device.check_access(tensor)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_call_that_fails_leaves_nothing_half_done(device: FakeVirtualMemory, call: str, count: int) -> None:
    arena = Arena("weights", 32 * PAGE, device, view)
    kept = [arena.allocate(3 * PAGE) for _ in range(2)]
    free = device.free_bytes
    device.fail_after(call, 0)
    with pytest.raises(RuntimeError, match=f"{call} fails"):
        arena.allocate(3 * PAGE)
    assert (device.free_bytes, pieces(device)) == (free, [3, 3])
    arena.unmap()
    device.fail_after(call, count)
    with pytest.raises(RuntimeError, match=f"{call} fails"):
        arena.map()
    assert not device.handles
    arena.map()
    for tensor in [*kept, arena.allocate(3 * PAGE)]:
        device.check_access(tensor)
    arena.close()
    device.check_nothing_left()


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_large_tensor_has_all_its_pieces_or_none(device: FakeVirtualMemory, call: str, count: int) -> None:
    arena = Arena("weights", 32 * PAGE, device, view)
    kept = arena.allocate(PAGE).fill_(1)
    free = device.free_bytes
    device.fail_after(call, count)
    with pytest.raises(RuntimeError, match=f"{call} fails"):
        arena.allocate(15 * PAGE)
    assert (device.free_bytes, pieces(device)) == (free, [2])
    device.check_access(arena.allocate(15 * PAGE))
    assert pieces(device) == [2, 4, 4, 4, 2]
    assert bool((kept == 1).all())
    arena.close()
    device.check_nothing_left()


def test_each_piece_is_given_away_as_soon_as_it_is_mapped(arena: Arena, device: FakeDevice) -> None:
    for value, size in enumerate((100, 9 * PAGE, 3 * PAGE, 70)):
        arena.allocate(size).fill_(value)
    kept = arena.contents().clone()
    num_pieces = len(device.mapped)
    assert num_pieces > 2
    arena.unmap()
    num_mapped = []

    def restore(part: torch.Tensor, at: int) -> None:
        num_mapped.append(len(device.mapped))
        device.check_access(part)
        part.copy_(kept[at : at + len(part)])

    arena.map(restore)
    assert num_mapped == list(range(1, num_pieces + 1))
    assert torch.equal(arena.contents(), kept)
    arena.map(restore)
    assert len(num_mapped) == num_pieces, "they were there"


@pytest.mark.parametrize("count", range(3))
def test_a_use_that_fails_is_waited_for_and_takes_nothing(device: FakeVirtualMemory, count: int) -> None:
    arena = Arena("weights", 32 * PAGE, device, view)
    arena.allocate(9 * PAGE)
    arena.unmap()

    def use(part: torch.Tensor, at: int) -> None:
        if at == count * 4 * PAGE:
            raise OSError("the disk is gone")
        device.launch(part)

    with pytest.raises(OSError, match="the disk is gone"):
        arena.map(use)
    assert not device.handles
    arena.map()
    arena.close()
    device.check_nothing_left()


def test_no_addresses_no_arena(memory: VirtualMemory, device: FakeVirtualMemory) -> None:
    device.fail_after("reserve", 0)
    with pytest.raises(RuntimeError):
        Arena("weights", PAGE, memory, view)
    device.check_nothing_left()


def test_a_tensor_keeps_its_arena(device: FakeVirtualMemory) -> None:
    arena = Arena("weights", 4 * PAGE, device, view)
    half = arena.allocate(100).view(torch.float32)[:3]
    alive = weakref.ref(arena)
    del arena
    gc.collect()
    device.check_access(half)
    del half
    gc.collect()
    assert alive() is None
    device.check_nothing_left()


def test_close_does_not_wait_for_tensors(arena: Arena, device: FakeVirtualMemory) -> None:
    tensor = arena.allocate(100)
    device.launch(tensor)
    arena.close()
    arena.close()
    device.check_nothing_left()
    with pytest.raises(Misuse):
        device.check_access(tensor)
    with pytest.raises(AssertionError, match="closed"):
        arena.allocate(1)


def test_the_contents_are_all_that_is_used(arena: Arena, device: FakeVirtualMemory) -> None:
    tensors = [arena.allocate(size).fill_(value) for value, size in enumerate((100, 5 * PAGE, 300))]
    contents = arena.contents()
    device.check_access(contents)
    assert (contents.data_ptr(), len(contents)) == (tensors[0].data_ptr(), arena.used_bytes)
    assert contents[256 : 256 + 5 * PAGE].unique().tolist() == [1]
    assert contents[-300:].unique().tolist() == [2]
    del contents
    arena.unmap()
    with pytest.raises(AssertionError, match="is not mapped"):
        arena.contents()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls(device: FakeVirtualMemory, seed: int) -> None:
    """What is written stays while there is memory behind it; the device is charged for what is mapped, no more."""
    rng = random.Random(seed)
    arena = Arena("weights", 48 * PAGE, device, view)
    total, written = device.free_bytes, []
    for step in range(60):
        match rng.choice(["allocate", "allocate", "allocate", "unmap", "map", "fail"]):
            case "allocate" if arena.is_mapped:
                try:
                    tensor = arena.allocate(rng.randrange(1, 3 * PAGE))
                except (CapacityError, RuntimeError):
                    continue
                written.append((tensor.fill_(step), step))
            case "unmap":
                arena.unmap()
            case "map" if not arena.is_mapped:
                try:
                    arena.map()
                except RuntimeError:
                    continue
                written = [(tensor.fill_(value), value) for tensor, value in written]
            case "fail":
                device.fail_after(rng.choice(["create", "map", "set_access"]), rng.randrange(3))
        assert device.free_bytes == total - arena.mapped_bytes
        if arena.is_mapped:
            for tensor, value in written:
                device.check_access(tensor)
                assert int(tensor[0]) == int(tensor[-1]) == value
    arena.close()
    device.check_nothing_left()


def test_an_arena_a_tag(memory: VirtualMemory, device: FakeVirtualMemory) -> None:
    owner = ArenaMemory(32 * PAGE, memory, view)
    assert owner.mapped_bytes == 0
    tensors = [owner.allocate(PAGE, "weights"), owner.allocate(5 * PAGE, "kv_cache"), owner.allocate(PAGE, "weights")]
    assert {tag: arena.used_bytes for tag, arena in owner.arenas.items()} == {"weights": 2 * PAGE, "kv_cache": 5 * PAGE}
    assert owner.mapped_bytes == 64 * PAGE - device.free_bytes
    owner.arenas["kv_cache"].unmap()
    device.check_access(tensors[0])
    with pytest.raises(Misuse):
        device.check_access(tensors[1])
    owner.close()
    owner.close()
    device.check_nothing_left()


def test_plain_memory_is_aligned() -> None:
    plain = PlainMemory(torch.device("cpu"))
    for size in (0, 1, 1000, 5000):
        tensor = plain.allocate(size, "weights")
        assert (len(tensor), tensor.dtype, tensor.data_ptr() % ALIGNMENT) == (size, torch.uint8, 0)
    assert plain.mapped_bytes == 0
    plain.close()
