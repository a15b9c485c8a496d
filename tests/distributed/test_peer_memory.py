"""Ranks that agree on memory of each other's GPUs, over a driver that is only a table of bytes."""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from ringcore.distributed.peer_memory import CudaPeerDriver, PeerDriver, PeerMemory

NUM_BYTES = 256
FILL = 0xFF


@dataclass
class Machine:
    """All GPUs of a host. An address is good in the process of one rank only, as it is with real ones."""

    memory: dict[int, bytearray] = field(default_factory=dict)  # by handle, which is the number of the allocation
    views: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)  # (rank, address) -> (handle, own)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)


class FakeDriver(PeerDriver):
    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank = machine, rank

    def _view(self, handle: int, own: bool) -> int:
        with self.machine.lock:
            address = next(self.machine.numbers) << 12
            self.machine.views[self.rank, address] = handle, own
        return address

    def _bytes(self, address: int) -> tuple[bytearray, int]:
        base = address >> 12 << 12
        handle, _ = self.machine.views[self.rank, base]
        return self.machine.memory[handle], address - base

    def reaches(self, peer: int) -> bool:
        return True

    def allocate(self, num_bytes: int) -> int:
        with self.machine.lock:
            handle = next(self.machine.numbers)
            self.machine.memory[handle] = bytearray(num_bytes)
        return self._view(handle, own=True)

    def export(self, address: int) -> bytes:
        handle, own = self.machine.views[self.rank, address]
        assert own
        return handle.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        return self._view(int.from_bytes(handle, "little"), own=False)

    def close(self, address: int) -> None:
        _, own = self.machine.views.pop((self.rank, address))
        assert not own

    def free(self, address: int) -> None:
        handle, own = self.machine.views.pop((self.rank, address))
        assert own
        assert not any(other == handle for other, _ in self.machine.views.values()), "freed while another rank sees it"
        del self.machine.memory[handle]

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        memory, offset = self._bytes(address)
        assert offset + num_bytes <= len(memory)
        memory[offset : offset + num_bytes] = bytes([byte]) * num_bytes

    def read(self, address: int, num_bytes: int) -> bytes:
        assert self.machine.views[self.rank, address >> 12 << 12][1], "a rank reads its own memory"
        memory, offset = self._bytes(address)
        return bytes(memory[offset : offset + num_bytes])


def connect(size: int, drivers: list[PeerDriver]) -> list[PeerMemory | None]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            pool.submit(PeerMemory.connect, rank, size, store, NUM_BYTES, FILL, drivers[rank]) for rank in range(size)
        ]
        return [rank.result(timeout=30) for rank in ranks]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_sees_the_memory_of_every_other(size):
    machine = Machine()
    drivers = [FakeDriver(machine, rank) for rank in range(size)]
    ranks = connect(size, drivers)
    assert all(bytes(memory) == bytes([FILL]) * NUM_BYTES for memory in machine.memory.values())
    for writer, memory in enumerate(ranks):
        assert len(memory.addresses) == size
        for owner, address in enumerate(memory.addresses):
            drivers[writer].fill(address + 8 * writer, 10 * owner + writer, 1)
    for owner, memory in enumerate(ranks):
        found = drivers[owner].read(memory.addresses[owner], NUM_BYTES)
        assert [found[8 * writer] for writer in range(size)] == [10 * owner + writer for writer in range(size)]
    for memory in ranks:
        memory.close()
        memory.close()
    assert [own for _, own in machine.views.values()] == [True] * size  # no rank frees what another may still map


class Unreachable(FakeDriver):
    def reaches(self, peer):
        return peer != 1


class WithoutHandles(FakeDriver):
    def export(self, address):
        raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")


class CannotOpen(FakeDriver):
    def open(self, handle):
        raise RuntimeError("cuIpcOpenMemHandle: CUDA_ERROR_MAP_FAILED")


class LosesWrites(FakeDriver):
    def fill(self, address, byte, num_bytes):
        if self.machine.views[self.rank, address >> 12 << 12][1]:
            super().fill(address, byte, num_bytes)


class WithoutPackage(FakeDriver):
    def reaches(self, peer):
        raise ImportError("No module named 'cuda'")


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Unreachable, "rank 2: GPU 2 does not reach the memory of GPU 1"),
        (WithoutHandles, "rank 2: cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"),
        (CannotOpen, "rank 2: cuIpcOpenMemHandle: CUDA_ERROR_MAP_FAILED"),
        (LosesWrites, "rank 0: what GPU 2 wrote did not arrive in the memory of GPU 0"),
        (WithoutPackage, "rank 2: No module named 'cuda'"),
    ],
)
def test_where_one_rank_cannot_none_does(driver, reason, caplog):
    machine = Machine()
    drivers = [FakeDriver(machine, 0), FakeDriver(machine, 1), driver(machine, 2)]
    with caplog.at_level(logging.WARNING):
        assert connect(3, drivers) == [None] * 3
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert "NCCL" in caplog.text
    assert not machine.views  # all closed, then all freed
    assert not machine.memory


def test_an_absent_rank_ends_the_wait():
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(RuntimeError):
        PeerMemory.connect(0, 2, store, NUM_BYTES, FILL, FakeDriver(Machine(), 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the driver may be there")
def test_without_the_drivers_package_the_ranks_go_without():
    drivers = [CudaPeerDriver(torch.device("cuda", rank), 0) for rank in range(2)]
    assert connect(2, drivers) == [None, None]


class MemHandle:
    """As cuda-bindings 13.5 gives it: the address of the struct, and no field."""

    def __init__(self, data: bytes = bytes(64)) -> None:
        self.data = ctypes.create_string_buffer(data, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


def test_a_handle_travels_as_its_64_bytes():
    handle, opened = bytes(range(64)), []
    driver = CudaPeerDriver(torch.device("cuda", 0), 0)
    driver._driver = SimpleNamespace(
        cuIpcGetMemHandle=lambda address: (0, MemHandle(handle)),
        cuIpcOpenMemHandle=lambda handle, flags: (opened.append((bytes(handle.data), flags)), (0, 4096))[1],
        CUipcMemHandle=MemHandle,
        CUipcMem_flags=SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
    )
    assert driver.open(driver.export(256)) == 4096
    assert opened == [(handle, 1)]


def test_the_installed_package_gives_the_address_of_a_handle():
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    assert bindings.CU_IPC_HANDLE_SIZE == 64
    ctypes.memmove(bindings.CUipcMemHandle().getPtr(), bytes(range(64)), 64)
