"""A rank's memory goes and comes back: on every kind of device, with every kind of store, and when calls fail."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from device_kinds import DEVICES, PAGE, WatchedHost
from fake_ascendcl import FakeAscend
from fake_virtual_memory import FakeDevice, FakeVirtualMemory
from rank_memory import KV_CACHE_PAGES, LateLink, Rank

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.worker import sleep as sleep_module
from ringcore.worker.memory import arena as arena_module
from ringcore.worker.memory.file_store import FileStore
from ringcore.worker.memory.host_link import LocalLink
from ringcore.worker.memory.host_store import HostBudget, HostStore, MemoryStore

pytestmark = pytest.mark.sampled

PLENTY = HostBudget(lambda: 1 << 40, 1)
AWAY_1 = {"weights": "offloaded", "kv_cache": "discarded"}
AWAY_2 = {"weights": "discarded", "kv_cache": "discarded"}
BACK = {"weights": "resident", "kv_cache": "resident"}
# What a change tells of memory that goes, and of memory that comes.
FREED = {f"{what}_freed_bytes" for what in ("weights", "kv_cache", "cached")}
FREED |= {"residue_bytes", "unmap_s", "cached_s", "residue_s"}
MAPPED = {"mapped_bytes", "map_s", "weights_map_s", "kv_cache_map_s"}


class RegisteredLink(LocalLink):
    """As a GPU's: the store's memory is taken at once and stays."""

    wants_registered = True


def in_memory(num_bytes: int, device: FakeDevice) -> HostStore:
    return MemoryStore(num_bytes, LocalLink(), PLENTY)


def in_registered_memory(num_bytes: int, device: FakeDevice) -> HostStore:
    return MemoryStore(num_bytes, RegisteredLink(), PLENTY)


MakeStore = Callable[[int, FakeDevice], HostStore]
STORES: dict[str, Callable[[str], MakeStore]] = {
    "memory": lambda folder: in_memory,
    "registered": lambda folder: in_registered_memory,
    "file": lambda folder: lambda num_bytes, device: FileStore(num_bytes, folder, LocalLink()),
}
LATE_STORES: dict[str, Callable[[str], MakeStore]] = {
    "memory": lambda folder: lambda num_bytes, device: MemoryStore(num_bytes, LateLink(device), PLENTY),
    "file": lambda folder: lambda num_bytes, device: FileStore(num_bytes, folder, LateLink(device)),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MIN_PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(arena_module, "_MAX_PIECE_BYTES", 4 * PAGE)


@pytest.fixture(params=DEVICES)
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(request.param, in_memory)
    yield rank
    rank.close()


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("store", STORES)
def test_level_1_keeps_the_weights(kind: str, store: str, tmp_path: Path) -> None:
    rank = Rank(kind, STORES[store](str(tmp_path)))
    used = rank.arenas["weights"].used_bytes
    for seed in range(3):
        rank.write(seed)
        rank.device.launch(rank.pages)
        rank.platform.cached_bytes = 33
        report = rank.change(**AWAY_1)
        assert report.keys() == {
            *("copied_bytes", "copy_s", "host_store_s"),
            *FREED,
        }
        assert (report["copied_bytes"], report["cached_freed_bytes"], report["residue_bytes"]) == (used, 33, 7)
        assert {tag: report[f"{tag}_freed_bytes"] for tag in rank.bytes} == rank.bytes
        assert rank.memory.states == AWAY_1
        assert not rank.memory.is_resident
        rank.check()
        tenant = rank.device.create(60 * PAGE)  # somebody else has it meanwhile
        rank.device.release(tenant)
        report = rank.change(**BACK)
        assert report.keys() == {*MAPPED, "copied_bytes", "copy_s"}
        assert report["map_s"] == pytest.approx(sum(report[f"{tag}_map_s"] for tag in rank.bytes))
        assert (report["mapped_bytes"], report["copied_bytes"]) == (sum(rank.bytes.values()), used)
        assert rank.memory.is_resident
        rank.check()
        rank.check_weights()
        assert not rank.pages.any(), "pages are zero-filled"
    rank.close()
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_level_2_keeps_nothing(rank: Rank) -> None:
    report = rank.change(**AWAY_2)
    assert report.keys() == FREED
    rank.check()
    report = rank.change(**BACK)
    assert report.keys() == MAPPED
    rank.check()
    assert not rank.pages.any()
    rank.write(5)
    rank.change(**AWAY_1)
    rank.change(**BACK)
    rank.check_weights()


def test_tags_come_back_in_either_order(rank: Rank) -> None:
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        rank.change(**AWAY_1)
        rank.change(**{first: "resident"})
        rank.check()
        assert rank.memory.states[second] != "resident"
        rank.change(**{second: "resident"})
        rank.check()
        rank.check_weights()


def test_a_state_that_is_there_changes_nothing(rank: Rank) -> None:
    assert rank.change(**BACK) == {}
    rank.change(weights="offloaded")
    rank.check()
    assert rank.change(weights="offloaded", kv_cache="resident") == {}
    rank.change(kv_cache="discarded")
    assert rank.change(**AWAY_1) == {}
    rank.change(**BACK)
    rank.check_weights()


def test_what_was_offloaded_can_be_discarded(rank: Rank) -> None:
    rank.change(**AWAY_1)
    assert rank.change(weights="discarded") == {}
    assert rank.memory.states == AWAY_2
    rank.change(**BACK)
    rank.write(3)
    rank.change(**AWAY_1)
    rank.change(**BACK)
    rank.check_weights()


@pytest.mark.parametrize("target", [AWAY_1, AWAY_2, {"kv_cache": "discarded"}])
def test_a_prepared_sleep_can_be_rolled_back(rank: Rank, target: dict[str, str]) -> None:
    rank.memory.prepare(target)
    assert not rank.memory.is_resident
    rank.check_weights()
    with pytest.raises(AssertionError, match="prepared already"):
        rank.memory.prepare(target)
    rank.memory.roll_back()
    assert rank.memory.states == BACK
    assert rank.memory.is_resident
    rank.check()
    rank.check_weights()
    assert rank.pages.all(), "pages are as they were"
    rank.memory.roll_back()
    with pytest.raises(AssertionError, match="no change is prepared"):
        rank.memory.commit()
    rank.change(**AWAY_1)
    rank.change(**BACK)
    rank.check_weights()


@pytest.mark.parametrize("away", [AWAY_1, AWAY_2])
def test_a_prepared_wake_can_be_rolled_back(rank: Rank, away: dict[str, str]) -> None:
    rank.change(**away)
    rank.memory.prepare(BACK)
    rank.device.launch(rank.pages)  # the device may still be at it
    rank.memory.roll_back()
    assert rank.memory.states == away
    rank.check()
    rank.change(**BACK)
    rank.check()
    if away is AWAY_1:
        rank.check_weights()


def test_an_offload_of_a_discard_can_be_rolled_back(rank: Rank) -> None:
    rank.change(**AWAY_1)
    rank.memory.prepare(AWAY_2)
    rank.memory.roll_back()
    rank.change(**BACK)
    rank.check_weights()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"weights": "asleep"}, "'weights' cannot be 'asleep'; give weights: resident or offloaded or discarded, kv_"),
        ({"kv_cache": "offloaded"}, "'kv_cache' cannot be 'offloaded'"),
        ({"lora": "discarded"}, "'lora' cannot be 'discarded'"),
    ],
)
def test_what_is_no_state_is_refused(rank: Rank, target: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        rank.memory.prepare({"kv_cache": "discarded"} | target)
    rank.memory.roll_back()
    rank.check()
    assert rank.memory.states == BACK


def test_what_is_gone_cannot_be_offloaded(rank: Rank) -> None:
    rank.change(**AWAY_2)
    with pytest.raises(InvalidRequestError, match="are discarded, there is nothing to offload"):
        rank.memory.prepare(AWAY_1)
    rank.change(**BACK)
    rank.check()


@pytest.mark.parametrize("away", [AWAY_1, AWAY_2])
@pytest.mark.parametrize("room", [0, 4, 9])  # pages: not enough for the weights; enough for these alone
def test_too_little_memory_at_wake_takes_nothing(rank: Rank, away: dict[str, str], room: int) -> None:
    rank.change(**away)
    tenant = rank.device.create((64 - room) * PAGE)
    with pytest.raises(CapacityError, match=r"free; end what else uses this device") as error:
        rank.memory.prepare(BACK)
    fits = room * PAGE >= rank.bytes["weights"]
    needed = rank.bytes["weights"] + (rank.bytes["kv_cache"] if fits else 0)
    assert error.value.details == {"needed_bytes": needed, "available_bytes": room * PAGE}
    assert rank.memory.states == away
    assert rank.device.free_bytes == room * PAGE
    rank.memory.roll_back()
    rank.device.release(tenant)
    rank.check()
    rank.change(**BACK)
    rank.check()
    if away is AWAY_1:
        rank.check_weights()


def fail_each(rank: Rank, call: str) -> int:
    """A wake-up under which the k-th such call fails, for as many as there are, and then one that goes through; -> how
    many there are. After each failure the rank is asleep as before."""
    rank.change(**AWAY_1)
    num_failed = 0
    while True:
        rank.device.fail_after(call, num_failed)
        try:
            rank.memory.prepare(BACK)
        except RuntimeError:
            num_failed += 1
        else:
            break
        assert rank.memory.states == AWAY_1
        assert not rank.device.mapped
        rank.check()
    rank.device.fail_after(call, 1000)  # never
    rank.memory.commit()
    rank.check_weights()
    return num_failed


@pytest.mark.parametrize("call", ["create", "map", "set_access", "synchronize"])
def test_whichever_call_fails_the_rank_is_as_before(rank: Rank, call: str) -> None:
    num_failed = fail_each(rank, call)
    rank.check()
    num_pieces = len(rank.device.mapped)
    assert num_pieces >= 3
    expected = 0 if isinstance(rank.device, FakeAscend) and call == "set_access" else num_pieces  # it has no such call
    if call == "synchronize":
        expected = 0 if isinstance(rank.device, WatchedHost) else 2  # before, and after
    assert num_failed == expected


@pytest.fixture(params=["fake", "cuda"])
def late_rank(request: pytest.FixtureRequest, late_store: str, tmp_path: Path) -> Iterator[Rank]:
    """Its copies are under way until somebody waits. The weights are one tensor, in three pieces; so are the pages."""
    rank = Rank(request.param, LATE_STORES[late_store](str(tmp_path)), weights=(9 * PAGE,))
    yield rank
    rank.close()


@pytest.mark.parametrize("late_store", LATE_STORES)
def test_a_piece_is_copied_before_the_next_is_there(late_rank: Rank) -> None:
    device = late_rank.device
    assert isinstance(device, FakeVirtualMemory)
    late_rank.change(**AWAY_1)
    device.calls.clear()
    report = late_rank.change(**BACK)
    assert [call for call in device.calls if call in ("create", "copy")] == [*["create", "copy"] * 3, *["create"] * 3]
    assert report["copied_bytes"] == 9 * PAGE
    late_rank.check()
    late_rank.check_weights()
    assert not late_rank.pages.any()


@pytest.mark.parametrize("late_store", LATE_STORES)
@pytest.mark.parametrize("call", ["create", "map", "set_access", "copy"])
def test_copies_have_ended_before_their_memory_goes(late_rank: Rank, call: str) -> None:
    """Whichever call fails while the pieces before it are filled. The device refuses to unmap what it still writes."""
    assert fail_each(late_rank, call) == (3 if call == "copy" else 6)


@pytest.mark.parametrize("late_store", LATE_STORES)
@pytest.mark.parametrize("room", range(0, 21, 3))
def test_memory_that_ends_amid_a_tensor(late_rank: Rank, room: int) -> None:
    late_rank.change(**AWAY_1)
    tenant = late_rank.device.create((64 - room) * PAGE)
    with pytest.raises(CapacityError) as error:
        late_rank.memory.prepare(BACK)
    needed = 9 if room < 9 else 9 + KV_CACHE_PAGES
    assert error.value.details == {"needed_bytes": needed * PAGE, "available_bytes": room * PAGE}
    assert late_rank.device.free_bytes == room * PAGE
    late_rank.device.release(tenant)
    late_rank.change(**BACK)
    late_rank.check()
    late_rank.check_weights()


@pytest.mark.parametrize("store", ["memory", "file"])
def test_copying_and_mapping_are_timed_apart(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that every call of the device moves on, and so does a copy."""
    now = [0.0]
    rank = Rank("fake", STORES[store](str(tmp_path)), weights=(9 * PAGE,))
    assert isinstance(rank.device, FakeVirtualMemory)
    rank.change(**AWAY_1)
    create, copy = rank.device.create, LocalLink.copy

    def slow_create(num_bytes: int) -> int:
        now[0] += 1
        return create(num_bytes)

    def slow_copy(self: LocalLink, source: torch.Tensor, out: torch.Tensor) -> None:
        now[0] += 10
        copy(self, source, out)

    monkeypatch.setattr(rank.device, "create", slow_create)
    monkeypatch.setattr(LocalLink, "copy", slow_copy)
    monkeypatch.setattr(sleep_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = rank.change(**BACK)
    times = {name: report[name] for name in ("map_s", "weights_map_s", "kv_cache_map_s", "copy_s")}
    assert times == {"map_s": 6, "weights_map_s": 3, "kv_cache_map_s": 3, "copy_s": 3 * 10 + 2 + 3}
    rank.close()


def test_a_failure_before_the_copy_leaves_everything(rank: Rank) -> None:
    if isinstance(rank.device, WatchedHost):
        pytest.skip("a CPU has nothing to wait for")
    rank.device.fail_after("synchronize", 0)
    with pytest.raises(RuntimeError):
        rank.memory.prepare(AWAY_1)
    rank.check()
    rank.change(**AWAY_1)
    rank.change(**BACK)
    rank.check_weights()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", ["fake", "host"])
def test_twenty_cycles_leave_nothing(kind: str, store: str, tmp_path: Path) -> None:
    rank = Rank(kind, STORES[store](str(tmp_path)), num_pages=200, weights=(100 * PAGE,))
    process = psutil.Process()
    most = 4 * 100 * PAGE // 10  # bytes, a tenth of what weights that stay would come to

    def cycle() -> None:
        rank.change(**AWAY_1)
        rank.change(**BACK)
        rank.change(**AWAY_2)
        rank.change(**BACK)
        rank.weights[0].copy_(rank.written[0])

    for _ in range(3):
        cycle()
    gc.collect()
    maps, growths = len(process.memory_maps(grouped=False)), []

    def held() -> tuple[int, ...]:
        num_fds = len(os.listdir("/proc/self/fd"))
        return process.memory_info().rss, num_fds, process.num_threads(), rank.device.free_bytes

    while len(growths) < 3 and (
        not growths or growths[-1] >= most
    ):  # an allocator may grow once, a leak does each time
        before = held()
        for _ in range(20):
            cycle()
        gc.collect()
        after = held()
        assert after[1:] == before[1:]
        growths.append(after[0] - before[0])
    assert growths[-1] < most, growths
    assert len(process.memory_maps(grouped=False)) <= maps + 2
    rank.check()
    rank.check_weights()
    rank.close()


def test_the_pages_of_a_cpu_stay_untouched() -> None:
    """To fill them with zeros would take them."""
    rank = Rank("host", in_memory, num_pages=4000)
    rank.change(kv_cache="discarded")
    rank.change(kv_cache="resident")
    (file,) = [h for _, h in rank.device.mapped.values() if os.fstat(h).st_size >= KV_CACHE_PAGES * PAGE - 2 * PAGE]
    assert os.fstat(file).st_blocks == 0
    rank.close()
