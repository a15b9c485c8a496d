"""Peer memory: memory on each rank's GPU that the GPUs of the other ranks write, by CUDA IPC handles.

The ranks agree: either every rank has peer access to every other, probed with real writes, or none uses peer memory.
Links that the driver reports as working and that lose writes have been seen, in virtual machines above all.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["CudaPeerDriver", "KeyValueStore", "PeerDriver", "PeerMemory"]

_log = logging.getLogger(__name__)
_OK = "+"
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_PROBE_BYTES = 16  # that each rank writes into every other rank's memory


class PeerDriver(ABC):
    """The GPU driver's calls that `PeerMemory` needs. Every method raises RuntimeError if the driver refuses."""

    @abstractmethod
    def reaches(self, peer: int) -> bool:
        """Whether this GPU can read and write the memory of rank `peer`'s GPU."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> int:
        """-> the address of new memory, a multiple of 256."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """-> an IPC handle, with which another process can `open` what `allocate` returned."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """-> the address at which another process's memory is mapped here."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Undoes `open`."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Undoes `allocate`."""

    @abstractmethod
    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        """Complete, and visible to every GPU, when it returns."""

    @abstractmethod
    def read(self, address: int, num_bytes: int) -> bytes:
        """Of this GPU's own memory."""


class KeyValueStore(Protocol):
    """The part of torch's stores that the rendezvous needs. `get` waits for a key, up to the store's timeout."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class PeerMemory:
    """`num_bytes` on every rank's GPU, as mapped on this rank's GPU."""

    def __init__(self, driver: PeerDriver, rank: int, addresses: list[int]) -> None:
        self._driver, self._rank = driver, rank
        self.addresses = tuple(addresses)  # by rank

    @classmethod
    def connect(
        cls, rank: int, size: int, store: KeyValueStore, num_bytes: int, fill_byte: int, driver: PeerDriver
    ) -> PeerMemory | None:
        """The memory is filled with `fill_byte` before any rank returns.

        None on every rank if any rank refuses: rank 0's log says which, and why. Raises RuntimeError if a rank is
        absent.
        """
        assert num_bytes >= size * _PROBE_BYTES, (num_bytes, size)
        handshake = _Handshake(rank, size, store, num_bytes, fill_byte, driver)
        refusals = handshake.run()
        if not refusals:
            return cls(driver, rank, handshake.addresses)
        handshake.give_up()
        if rank == 0:
            _log.warning("no peer memory between the GPUs, so NCCL for messages of all sizes: %s", "; ".join(refusals))
        return None

    def close(self) -> None:
        """Unmaps the other ranks' memory. Its own memory is not freed before the process ends: another rank may still
        map it, and is not asked, because it may be dead. Idempotent."""
        addresses, self.addresses = self.addresses, ()
        for rank, address in enumerate(addresses):
            if rank != self._rank:
                self._driver.close(address)


class _Handshake:
    """Three rounds; each ends when every rank has reported its result."""

    def __init__(
        self, rank: int, size: int, store: KeyValueStore, num_bytes: int, fill_byte: int, driver: PeerDriver
    ) -> None:
        self._rank, self._size, self._store, self._driver = rank, size, store, driver
        self._num_bytes, self._fill_byte = num_bytes, fill_byte
        self._own: int | None = None
        self._opened: dict[int, int] = {}  # by rank

    @property
    def addresses(self) -> list[int]:
        assert self._own is not None
        return [self._opened.get(rank, self._own) for rank in range(self._size)]

    def run(self) -> list[str]:
        """The ranks' refusals; empty on success."""
        handles, refusals = self._round("handles", self._offer)
        if not refusals:
            _, refusals = self._round("writes", lambda: self._write_to_others(handles))
        if not refusals:
            _, refusals = self._round("reads", self._check_own)
        return refusals

    def give_up(self) -> None:
        """No rank frees its memory before all have unmapped it."""
        self._round("closed", self._close)
        if self._own is not None:
            self._driver.free(self._own)

    def _round(self, name: str, work: Callable[[], str]) -> tuple[list[str], list[str]]:
        """What every rank's work returned, and the refusals."""
        try:
            reply = _OK + work()
        except (RuntimeError, ImportError) as error:
            reply = f"rank {self._rank}: {error}"
        self._store.set(f"peer_memory/{name}/{self._rank}", reply)
        replies = [self._store.get(f"peer_memory/{name}/{rank}").decode() for rank in range(self._size)]
        return [one.removeprefix(_OK) for one in replies], [one for one in replies if not one.startswith(_OK)]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _offer(self) -> str:
        """-> the IPC handle of this rank's memory, already filled."""
        for peer in self._others():
            if not self._driver.reaches(peer):
                raise RuntimeError(f"GPU {self._rank} does not reach the memory of GPU {peer}")
        self._own = self._driver.allocate(self._num_bytes)
        self._driver.fill(self._own, self._fill_byte, self._num_bytes)
        return self._driver.export(self._own).hex()

    def _write_to_others(self, handles: Sequence[str]) -> str:
        for peer in self._others():
            self._opened[peer] = self._driver.open(bytes.fromhex(handles[peer]))
            self._driver.fill(
                self._opened[peer] + self._rank * _PROBE_BYTES, self._probe_byte(self._rank), _PROBE_BYTES
            )
        return ""

    def _check_own(self) -> str:
        assert self._own is not None
        for peer in self._others():
            found = self._driver.read(self._own + peer * _PROBE_BYTES, _PROBE_BYTES)
            if found != bytes([self._probe_byte(peer)]) * _PROBE_BYTES:
                raise RuntimeError(f"what GPU {peer} wrote did not arrive in the memory of GPU {self._rank}")
        self._driver.fill(self._own, self._fill_byte, self._num_bytes)
        return ""

    def _probe_byte(self, sender: int) -> int:
        """A byte different from the fill."""
        return (self._fill_byte + 1 + sender) % 256

    def _close(self) -> str:
        for address in self._opened.values():
            self._driver.close(address)
        return ""


class CudaPeerDriver(PeerDriver):
    """The CUDA driver, through cuda-bindings, in torch's context on `device`."""

    def __init__(self, device: torch.device, first_gpu: int) -> None:
        """first_gpu: the index of rank 0's GPU, which those of the other ranks follow."""
        self._device, self._first_gpu = device, first_gpu
        self._driver: Any = None

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a driver function and returns its result without the error code."""
        if self._driver is None:
            from cuda.bindings import driver

            torch.cuda.synchronize(self._device)  # creates torch's context, which the calls use
            self._driver = driver
        error, *values = getattr(self._driver, name)(*args)
        if int(error):
            raise RuntimeError(f"{name}: {error}")
        return values[0] if values else None

    def reaches(self, peer: int) -> bool:
        return bool(self._call("cuDeviceCanAccessPeer", self._device.index, self._first_gpu + peer))

    def allocate(self, num_bytes: int) -> int:
        return int(self._call("cuMemAlloc", num_bytes))

    def export(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        # By address, not by the field `reserved`: cuda-bindings 13.5 has no such field.
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        assert self._driver is not None, "export before open"
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self._call("cuIpcOpenMemHandle", opened, flags))

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        self._call("cuMemsetD8", address, byte, num_bytes)
        torch.cuda.synchronize(self._device)

    def read(self, address: int, num_bytes: int) -> bytes:
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._call("cuMemcpyDtoH", data.data_ptr(), address, num_bytes)
        return bytes(data.numpy())
