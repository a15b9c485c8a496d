"""NCCL broadcasts between GPUs, without torch's process groups.

A torch process group has a watchdog thread, which ends the process if a peer is lost. Here a lost peer is an error: the
communicator is non-blocking, and the waiting thread polls its deadline and NCCL's asynchronous error.

The calls are those of NCCL's API (NVIDIA, "NCCL documentation", "NCCL API"), from the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

__all__ = ["NcclBroadcaster", "load_nccl"]

_UINT8 = 1  # ncclDataType_t
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_POLL_S = 5e-5  # between two polls of the device


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """That of NCCL 2.14, the first with one: later versions default their new fields by `version`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def load_nccl() -> Any:
    """The library, its functions declared. Raises OSError if it is not installed."""
    library = ctypes.CDLL("libnccl.so.2")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    declare(library, "ncclGetErrorString", ctypes.c_char_p, integer)
    declare(library, "ncclGetUniqueId", integer, ctypes.POINTER(_UniqueId))
    of_comm = ctypes.POINTER(pointer), integer, _UniqueId, integer, ctypes.POINTER(_Config)
    declare(library, "ncclCommInitRankConfig", integer, *of_comm)
    of_buffers = pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer
    declare(library, "ncclBroadcast", integer, *of_buffers)
    declare(library, "ncclCommGetAsyncError", integer, pointer, ctypes.POINTER(integer))
    declare(library, "ncclCommAbort", integer, pointer)
    return library


def declare(library: Any, name: str, result: Any, *arguments: Any) -> None:
    function = library[name]
    setattr(library, name, function)
    function.restype, function.argtypes = result, arguments


class NcclBroadcaster:
    """One rank of a communicator whose rank 0 sends. Every method raises RuntimeError, with NCCL's error string, if a
    call fails or misses its deadline; then the communicator is unusable and must be closed."""

    def __init__(self, library: Any, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        """Begins to connect; `connect` waits. unique_id: from `new_unique_id` on rank 0, the same on all ranks."""
        self._library, self._device = library, device
        self._comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        identity = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            code = library.ncclCommInitRankConfig(ctypes.byref(self._comm), size, identity, rank, ctypes.byref(config))
        self._check(code, "ncclCommInitRankConfig")

    @staticmethod
    def new_unique_id(library: Any) -> bytes:
        identity = _UniqueId()
        code = library.ncclGetUniqueId(ctypes.byref(identity))
        if code != _SUCCESS:
            raise RuntimeError(f"ncclGetUniqueId: {library.ncclGetErrorString(code).decode()}")
        return bytes(identity)

    def connect(self, timeout_s: float) -> None:
        """Returns when all ranks are connected."""
        self._settle("ncclCommInitRankConfig", time.monotonic() + timeout_s)

    def broadcast(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """buffer: contiguous, on the device; rank 0's is sent, on the current stream, into those of the other ranks.
        Returns when it has arrived."""
        assert buffer.is_contiguous()
        deadline = time.monotonic() + timeout_s
        stream = torch.cuda.current_stream(self._device)
        address, handle = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.device(self._device):
            code = self._library.ncclBroadcast(address, address, buffer.nbytes, _UINT8, 0, self._comm, handle)
        self._check(code, "ncclBroadcast")
        self._settle("ncclBroadcast", deadline)  # enqueued on the stream by then
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
        while not done.query():  # type: ignore[no-untyped-call]
            self._state("ncclBroadcast")
            _sleep_until_poll("ncclBroadcast", deadline)

    def _settle(self, what: str, deadline: float) -> None:
        while self._state(what) == _IN_PROGRESS:
            _sleep_until_poll(what, deadline)

    def _state(self, what: str) -> int:
        """Of the last call and of the connection: success, or in progress."""
        state = ctypes.c_int(_SUCCESS)
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)), "ncclCommGetAsyncError")
        self._check(state.value, what)
        return state.value

    def _check(self, code: int, what: str) -> None:
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"{what}: {self._library.ncclGetErrorString(code).decode()}")

    def close(self) -> None:
        """Aborts what is in flight, on the device too, and destroys the communicator. Idempotent."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            with torch.cuda.device(self._device):
                self._library.ncclCommAbort(comm)


def _sleep_until_poll(what: str, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise RuntimeError(f"{what} is not done in time")
    time.sleep(_POLL_S)
