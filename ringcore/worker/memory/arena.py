"""Arenas: reserved ranges of device virtual addresses whose physical memory can be unmapped and mapped again.

Tensors and captured CUDA graphs refer to addresses. Tensors in an arena keep their addresses while the physical memory
is returned to the device, and are valid again after memory is mapped and the contents are copied back.

    reserved   |----------------------------- capacity -----------------------------|   virtual addresses, which are
    free mapped     |--- piece 0 ---|--- piece 1 ---|- piece 2 -|                            physical memory
    used       |-- tensor --|---- tensor ----|-- tensor --|                             bump-allocated

The interface follows CUDA's (CUDA driver API, "Virtual memory management"); Ascend has the same under other names.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes

__all__ = ["ALIGNMENT", "Arena", "PieceUse", "TensorView", "VirtualMemory"]

ALIGNMENT = 256  # bytes, of a tensor's address; torch's allocators and the copy engines prefer the same
_MIN_PIECE_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30  # mapping 16 handles of 1 GiB takes as long as one of 16 GiB, but 107 of them take 0.1 s:
_LARGE_SHARE = 16  # so a piece may also be 1/16 of its arena
_SMALL_SHARE = 8  # a piece for small tensors is at most 1/8 of the mapped memory


class VirtualMemory(ABC):
    """The virtual memory management of one device: address ranges and physical memory separately. Sizes in bytes.

    All sizes and addresses are multiples of `granularity`. A handle owns physical memory. Every method raises
    `CapacityError` where the device is out of memory, and RuntimeError with the driver's message for any other error.
    """

    granularity: int

    # Whether `create` may wait for memory to be cleared. CUDA's driver clears released memory in the background, at a
    # few hundred GB/s: one large handle waits for all of its memory, the first of several only for its own share.
    waits_to_create: ClassVar[bool] = True

    @abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """-> the base address of a reserved range."""

    @abstractmethod
    def create(self, num_bytes: int) -> Any:
        """-> a handle of uninitialized physical memory."""

    @abstractmethod
    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Maps all of a handle's memory at reserved, unmapped addresses."""

    @abstractmethod
    def set_access(self, address: int, num_bytes: int) -> None:
        """Lets the device read and write mapped addresses."""

    @abstractmethod
    def unmap(self, address: int, num_bytes: int) -> None:
        """Undoes one `map`."""

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Returns unmapped physical memory to the device."""

    @abstractmethod
    def free(self, address: int, num_bytes: int) -> None:
        """Undoes one `reserve`; nothing may be mapped in the range."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work on the device, so that no kernel or copy uses memory that is unmapped next."""


# (address, bytes, owner) -> a uint8 tensor over mapped addresses, which keeps `owner` alive
TensorView = Callable[[int, int, object], torch.Tensor]

# (uint8 [n]: a part of an arena's contents, its offset in bytes) -> None
PieceUse = Callable[[torch.Tensor, int], None]


@dataclass(slots=True)
class _Piece:
    offset: int
    num_bytes: int
    handle: Any  # None while unmapped


class Arena:
    """A bump allocator of the tensors of one tag on one device; tensors are not freed individually.

    Pieces are contiguous from offset 0; `_end` is the end of the last one, `used_bytes` <= `_end` <= `capacity`. Every
    piece is at least partly used. A tensor may span several pieces.
    A tensor keeps its arena alive. `close` does not wait for tensors: they must not be accessed afterwards.
    """

    def __init__(self, tag: str, capacity: int, memory: VirtualMemory, view: TensorView) -> None:
        """Reserves `capacity` bytes of addresses, rounded up. tag: its name in the log and in errors."""
        self.tag = tag
        self._memory, self._view = memory, view
        self._pieces: list[_Piece] = []
        self._end = 0
        self.used_bytes = 0
        self._address: int | None = None  # None before it is reserved, and after `close`
        self.capacity = _round_up(capacity, memory.granularity)
        self._address = memory.reserve(self.capacity)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the driver frees the memory, and may be unloaded already
            self.close()

    @property
    def mapped_bytes(self) -> int:
        """The physical memory mapped now."""
        return sum(piece.num_bytes for piece in self._pieces if piece.handle is not None)

    @property
    def is_mapped(self) -> bool:
        """Whether every piece is mapped."""
        return all(piece.handle is not None for piece in self._pieces)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """-> uninitialized uint8 [num_bytes] at a multiple of 256 bytes.

        Raises `CapacityError` where the device or the arena lacks memory.
        """
        assert self._address is not None, f"arena {self.tag} is closed"
        assert self.is_mapped, f"arena {self.tag} is not mapped"
        begin = _round_up(self.used_bytes, ALIGNMENT)
        length = max(1, num_bytes)  # so that an empty tensor has an address of its own
        if begin + length > self._end:
            self._grow(begin + length - self._end)
        self.used_bytes = begin + length
        return self._view(self._address + begin, length, self)[:num_bytes]

    def _grow(self, num_bytes: int) -> None:
        """Maps `num_bytes` or more. A large tensor gets pieces of its size; small tensors share pieces that grow with
        the arena: few handles, since each costs time, and little unused memory."""
        left = self.capacity - self._end
        if num_bytes > left:
            raise CapacityError(
                f"{self.tag}: {format_bytes(num_bytes)} more do not fit into an arena of "
                f"{format_bytes(self.capacity)}, of which {format_bytes(self.used_bytes)} are used",
                needed_bytes=num_bytes,
                available_bytes=left,
            )
        shared = min(max(self._end // _SMALL_SHARE, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        wanted = min(_round_up(max(num_bytes, shared), self._memory.granularity), left)
        pieces = self._cut(wanted)
        self._map_all(pieces, "to grow")
        self._pieces += pieces
        self._end += wanted

    def _cut(self, num_bytes: int) -> list[_Piece]:
        """-> unmapped pieces of `num_bytes` in all, after the existing ones."""
        end = self._end + num_bytes
        largest = _round_up(max(_MAX_PIECE_BYTES, end // _LARGE_SHARE), self._memory.granularity)
        if not self._memory.waits_to_create:
            largest = num_bytes
        return [_Piece(at, min(largest, end - at), None) for at in range(self._end, end, largest)]

    def contents(self) -> torch.Tensor:
        """uint8 [used_bytes]: all tensors and the padding between them, in address order."""
        assert self._address is not None, f"arena {self.tag} is closed"
        assert self.is_mapped, f"arena {self.tag} is not mapped"
        return self._view(self._address, max(1, self.used_bytes), self)[: self.used_bytes]

    def unmap(self) -> None:
        """Returns all physical memory to the device and keeps the addresses; the contents are lost. Idempotent.

        Waits for the device first. Until `map`, any access to a tensor of the arena is illegal.
        """
        self._memory.synchronize()
        for piece in self._pieces:
            self._unmap_piece(piece)

    def map(self, use: PieceUse | None = None) -> None:
        """Maps uninitialized memory at all unmapped pieces. Idempotent.

        use: called with each piece's part of `contents` as soon as the piece is mapped, in address order. Asynchronous
        work that it starts, such as a copy, overlaps with the mapping of the next piece.

        Raises `CapacityError`, with the total need, where the device lacks memory. On any error, also of `use`, it
        waits for the device and unmaps the new pieces.
        """
        self._map_all([piece for piece in self._pieces if piece.handle is None], "to be mapped again", use)

    def _map_all(self, pieces: list[_Piece], purpose: str, use: PieceUse | None = None) -> None:
        """Maps all pieces or none. purpose: of the memory, for the error."""
        try:
            for piece in pieces:
                self._map_piece(piece)
                if use is not None:
                    use(self._used_part(piece), piece.offset)
        except BaseException as error:
            taken = sum(piece.num_bytes for piece in pieces if piece.handle is not None)
            self._memory.synchronize()
            for piece in pieces:
                self._unmap_piece(piece)
            if isinstance(error, CapacityError):
                raise self._capacity_error(purpose, sum(piece.num_bytes for piece in pieces), taken, error) from error
            raise

    def _used_part(self, piece: _Piece) -> torch.Tensor:
        assert self._address is not None, f"arena {self.tag} is closed"
        num_bytes = min(piece.num_bytes, self.used_bytes - piece.offset)
        assert num_bytes > 0, f"arena {self.tag} has an unused piece"
        return self._view(self._address + piece.offset, num_bytes, self)

    def _capacity_error(self, purpose: str, needed: int, taken: int, error: CapacityError) -> CapacityError:
        """taken: bytes that were mapped before the failure and are unmapped again."""
        available = error.details.get("available_bytes", 0) + taken
        return CapacityError(
            f"{self.tag}: {purpose} it needs {format_bytes(needed)}, {format_bytes(available)} are free; end what "
            f"else uses this device, and try again ({error.message})",
            needed_bytes=needed,
            available_bytes=available,
        )

    def close(self) -> None:
        """Frees memory and addresses. Idempotent."""
        if self._address is None:
            return
        self.unmap()
        address, self._address = self._address, None
        self._memory.free(address, self.capacity)
        self._pieces, self._end, self.used_bytes = [], 0, 0

    def _map_piece(self, piece: _Piece) -> None:
        assert self._address is not None, f"arena {self.tag} is closed"
        memory, address = self._memory, self._address + piece.offset
        handle = memory.create(piece.num_bytes)
        try:
            memory.map(address, piece.num_bytes, handle)
        except BaseException:
            memory.release(handle)
            raise
        piece.handle = handle  # from here on `_unmap_piece` undoes it
        memory.set_access(address, piece.num_bytes)

    def _unmap_piece(self, piece: _Piece) -> None:
        assert self._address is not None, f"arena {self.tag} is closed"
        if piece.handle is not None:
            self._memory.unmap(self._address + piece.offset, piece.num_bytes)
            handle, piece.handle = piece.handle, None
            self._memory.release(handle)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
