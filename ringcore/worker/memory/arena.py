"""Arenas: ranges of device addresses with memory behind them that can be taken away and given back.

A captured graph and a tensor are addresses. What lives in an arena keeps its addresses while the physical memory behind
them is returned to the device, and is the same again once there is memory behind them and the contents are copied back.

    reserved   |----------------------------- capacity -----------------------------|   addresses, which cost nothing
    mapped     |--- piece 0 ---|--- piece 1 ---|- piece 2 -|                            physical memory behind them
    used       |-- tensor --|---- tensor ----|-- tensor --|                             carved, in order of asking

The calls are those of CUDA's driver (CUDA driver API, "Virtual memory management"), which Ascend has under other names.
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

ALIGNMENT = 256  # bytes: of a tensor's address, as torch's own allocators and the copy engines like it
_MIN_PIECE_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30  # 16 handles of it take the driver no longer than one of 16 GiB, but 107 of them 0.1 s:
_LARGE_SHARE = 16  # so a piece may also be this part of its arena
_SMALL_SHARE = 8  # a piece for small tensors is at most this part of what is mapped already


class VirtualMemory(ABC):
    """One device's virtual addresses and physical memory, apart from each other. Sizes and addresses in bytes.

    All sizes and addresses are multiples of `granularity`. A handle stands for physical memory. Every method raises
    `CapacityError` where the device has no memory left, and RuntimeError with the driver's words for anything else.
    """

    granularity: int

    # Whether `create` may wait until so much is cleared. CUDA's driver clears what was released in the background, at a
    # few hundred GB/s: one large handle has to wait for all of it, the first of several for its own share.
    waits_to_create: ClassVar[bool] = True

    @abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """-> the first of so many addresses, which nobody else gets."""

    @abstractmethod
    def create(self, num_bytes: int) -> Any:
        """-> the handle of so much physical memory; what it holds is not said."""

    @abstractmethod
    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Puts a handle's memory, all of it, behind reserved addresses that have none."""

    @abstractmethod
    def set_access(self, address: int, num_bytes: int) -> None:
        """Lets the device read and write mapped addresses."""

    @abstractmethod
    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes away what one `map` put there."""

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Gives physical memory, no longer mapped, back to the device."""

    @abstractmethod
    def free(self, address: int, num_bytes: int) -> None:
        """Gives up what one `reserve` took; nothing may be mapped there."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has done all it was given, so that nothing uses what is unmapped next."""


# (address, bytes, owner) -> a uint8 tensor over mapped addresses, which keeps `owner` alive
TensorView = Callable[[int, int, object], torch.Tensor]

# (uint8 [n] of an arena's contents, the first of these bytes) -> None
PieceUse = Callable[[torch.Tensor, int], None]


@dataclass(slots=True)
class _Piece:
    offset: int
    num_bytes: int
    handle: Any  # None while there is no memory behind it


class Arena:
    """The tensors of one purpose, on one device. They are carved and never given back one by one.

    pieces: contiguous from offset 0; `_end` is where the last one ends, `used_bytes` <= `_end` <= `capacity`. A part of
    each, at least, is used. A tensor may lie in several.
    A tensor keeps its arena alive. `close` does not wait for tensors: after it they must not be touched.
    """

    def __init__(self, tag: str, capacity: int, memory: VirtualMemory, view: TensorView) -> None:
        """Reserves `capacity` bytes of addresses, rounded up. tag: what the log and errors call it."""
        self.tag = tag
        self._memory, self._view = memory, view
        self._pieces: list[_Piece] = []
        self._end = 0
        self.used_bytes = 0
        self._address: int | None = None  # until it is reserved, and after `close`
        self.capacity = _round_up(capacity, memory.granularity)
        self._address = memory.reserve(self.capacity)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the process takes everything with it, the driver first
            self.close()

    @property
    def mapped_bytes(self) -> int:
        """Physical memory that the arena has now."""
        return sum(piece.num_bytes for piece in self._pieces if piece.handle is not None)

    @property
    def is_mapped(self) -> bool:
        """Whether all its tensors have memory behind them."""
        return all(piece.handle is not None for piece in self._pieces)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """-> uint8 [num_bytes] at a multiple of 256 bytes; what it holds is not said.

        Raises `CapacityError` where the device or the arena has too little left.
        """
        assert self._address is not None, f"arena {self.tag} is closed"
        assert self.is_mapped, f"arena {self.tag} has no memory behind it"
        begin = _round_up(self.used_bytes, ALIGNMENT)
        length = max(1, num_bytes)  # so that an empty tensor has an address of its own
        if begin + length > self._end:
            self._grow(begin + length - self._end)
        self.used_bytes = begin + length
        return self._view(self._address + begin, length, self)[:num_bytes]

    def _grow(self, num_bytes: int) -> None:
        """Maps `num_bytes` or more. A large tensor gets what it needs, in as many pieces as that takes; many small ones
        share pieces that grow with the arena: few handles, since each costs, and little that nobody uses."""
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
        """-> pieces of so much in all, behind those that there are, and without memory."""
        end = self._end + num_bytes
        largest = _round_up(max(_MAX_PIECE_BYTES, end // _LARGE_SHARE), self._memory.granularity)
        if not self._memory.waits_to_create:
            largest = num_bytes
        return [_Piece(at, min(largest, end - at), None) for at in range(self._end, end, largest)]

    def contents(self) -> torch.Tensor:
        """uint8 [used_bytes]: all its tensors, and what lies between them, in the order of their addresses."""
        assert self._address is not None, f"arena {self.tag} is closed"
        assert self.is_mapped, f"arena {self.tag} has no memory behind it"
        return self._view(self._address, max(1, self.used_bytes), self)[: self.used_bytes]

    def unmap(self) -> None:
        """Gives all physical memory back to the device and keeps the addresses; the contents are gone. Idempotent.

        Waits for the device first. Until `map`, whoever touches a tensor of the arena has an illegal access.
        """
        self._memory.synchronize()
        for piece in self._pieces:
            self._unmap_piece(piece)

    def map(self, use: PieceUse | None = None) -> None:
        """Puts new memory behind all addresses; what it holds is not said. Idempotent.

        use: given the part of `contents` that lies in a piece as soon as that is mapped, in the order of addresses.
        What it begins, a copy say, goes on while the next piece is waited for.

        Raises `CapacityError`, with what it needs in all, where the device does not have it. Whatever it raises, or
        `use` does, it has waited for the device then and takes none.
        """
        self._map_all([piece for piece in self._pieces if piece.handle is None], "to have memory again", use)

    def _map_all(self, pieces: list[_Piece], purpose: str, use: PieceUse | None = None) -> None:
        """All of them, or none. purpose: what the error says that the memory is for."""
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
                raise self._no_room(purpose, sum(piece.num_bytes for piece in pieces), taken, error) from error
            raise

    def _used_part(self, piece: _Piece) -> torch.Tensor:
        assert self._address is not None, f"arena {self.tag} is closed"
        num_bytes = min(piece.num_bytes, self.used_bytes - piece.offset)
        assert num_bytes > 0, f"arena {self.tag} has a piece that nobody uses"
        return self._view(self._address + piece.offset, num_bytes, self)

    def _no_room(self, purpose: str, needed: int, taken: int, error: CapacityError) -> CapacityError:
        """taken: what was mapped before the device said no, and is given back."""
        available = error.details.get("available_bytes", 0) + taken
        return CapacityError(
            f"{self.tag}: {purpose} it needs {format_bytes(needed)}, {format_bytes(available)} are free; end what "
            f"else uses this device, and try again ({error.message})",
            needed_bytes=needed,
            available_bytes=available,
        )

    def close(self) -> None:
        """Gives back memory and addresses. Idempotent."""
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
        piece.handle = handle  # from here on `_unmap_piece` takes it back
        memory.set_access(address, piece.num_bytes)

    def _unmap_piece(self, piece: _Piece) -> None:
        assert self._address is not None, f"arena {self.tag} is closed"
        if piece.handle is not None:
            self._memory.unmap(self._address + piece.offset, piece.num_bytes)
            handle, piece.handle = piece.handle, None
            self._memory.release(handle)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
