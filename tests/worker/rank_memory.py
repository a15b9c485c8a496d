"""One rank's memory without a rank: arenas of two tags over any device, and a store of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from device_kinds import PAGE, make_device
from fake_virtual_memory import FakeDevice, FakeVirtualMemory, view

from ringcore.worker.memory.arena import Arena, VirtualMemory
from ringcore.worker.memory.device_memory import ArenaMemory, MemoryTag
from ringcore.worker.memory.host_link import LocalLink
from ringcore.worker.memory.host_store import HostStore
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.platform import ProcessMemory
from ringcore.worker.sleep import RankMemory

__all__ = ["ArenaPlatform", "LateLink", "Rank"]

KV_CACHE_PAGES = 12


class LateLink(LocalLink):
    """As a GPU's: a copy ends when somebody waits for it, or for the device; host memory is taken once and stays."""

    wants_registered: ClassVar[bool] = True

    def __init__(self, device: FakeDevice) -> None:
        assert isinstance(device, FakeVirtualMemory)
        self._device = device

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        return self._device.begin_copy(source, out)

    def wait(self, copied: Any) -> None:
        self._device.end_copies(copied)

    def finish(self) -> None:
        self._device.end_copies()


class ArenaPlatform(CpuPlatform):
    """Its memory is all in arenas of `memory`."""

    def __init__(self, memory: VirtualMemory, *, is_zero: bool = False) -> None:
        """is_zero: whether new memory is zeros, as the CPU's own is."""
        super().__init__()
        self._arena_memory, self._virtual_memory, self._is_zero = ArenaMemory(1 << 30, memory, view), memory, is_zero
        self.cached_bytes = 0

    @property
    def arenas(self) -> Mapping[str, Arena]:
        return self._arena_memory.arenas

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        memory = self._arena_memory.allocate(num_bytes, tag)
        return memory.zero_() if tag == "kv_cache" else memory

    def clear_new(self, memory: torch.Tensor) -> None:
        if not self._is_zero:
            memory.zero_()

    def release_cached(self) -> int:
        freed, self.cached_bytes = self.cached_bytes, 0
        return freed

    def process_memory(self) -> ProcessMemory:
        return ProcessMemory(own_bytes=self._arena_memory.mapped_bytes + 7, torch_bytes=0, arena_bytes=0)

    def synchronize(self) -> None:
        self._virtual_memory.synchronize()

    def close(self) -> None:
        self._arena_memory.close()


class Rank:
    """Weights of a few tensors, of which `written` is what they held when they were last whole; and pages."""

    def __init__(self, kind: str, make_store: Any, num_pages: int = 64, weights: Sequence[int] = (1000, 5 * PAGE, 300)):
        """make_store: bytes, device -> HostStore"""
        self.device, memory = make_device(kind, num_pages)
        self.platform = ArenaPlatform(memory, is_zero=kind == "host")
        self.weights = [self.platform.allocate(size, "weights") for size in weights]
        self.pages = self.platform.allocate(KV_CACHE_PAGES * PAGE - 100, "kv_cache")
        self.addresses = [tensor.data_ptr() for tensor in (*self.weights, self.pages)]
        self.arenas = self.platform.arenas
        self.bytes = {tag: arena.mapped_bytes for tag, arena in self.arenas.items()}
        self.total_bytes = self.device.free_bytes + sum(self.bytes.values())
        self.store: HostStore = make_store(self.arenas["weights"].used_bytes, self.device)
        self.memory = RankMemory(self.platform, self.store)
        self.written: list[torch.Tensor] = []
        self.write(0)

    def write(self, seed: int) -> None:
        """New contents of the weights; and pages that are not zeros."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights:
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
        self.written = [tensor.clone() for tensor in self.weights]
        self.pages.fill_(1 + seed % 255)

    def change(self, **target: str) -> dict[str, float]:
        """Both phases; what they report together."""
        return self.memory.prepare(target) | self.memory.commit()

    def check_weights(self) -> None:
        for tensor, written in zip(self.weights, self.written, strict=True):
            self.device.check_access(tensor)
            assert torch.equal(tensor, written)

    def check(self) -> None:
        """What must be so between changes."""
        states = self.memory.states
        for tag, arena in self.arenas.items():
            assert arena.mapped_bytes == (self.bytes[tag] if states[tag] == "resident" else 0), tag
            assert arena.is_mapped == (states[tag] == "resident")
        mapped = sum(arena.mapped_bytes for arena in self.arenas.values())
        assert sum(size for size, _ in self.device.mapped.values()) == mapped, "mapped is what is accounted"
        assert len(self.device.handles) == len(self.device.mapped), "memory that nobody can reach"
        assert self.device.free_bytes == self.total_bytes - mapped
        assert [tensor.data_ptr() for tensor in (*self.weights, self.pages)] == self.addresses

    def close(self) -> None:
        self.store.close()
        self.platform.close()
        self.device.check_nothing_left()
