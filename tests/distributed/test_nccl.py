"""The calls into NCCL, on a library that plays it: in order, declared as they are, and never waited for without end."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcore.distributed import nccl
from ringcore.distributed.nccl import NcclBroadcaster
from ringcore.errors import InvalidRequestError
from ringcore.worker.weights import weight_group
from ringcore.worker.weights.weight_group import BroadcastGroup

GPU = torch.device("cuda", 2)
IDENTITY = bytes(range(1, 129))
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7


class FakeNccl:
    """One rank's library. `states`: what the next looks at the communicator find; then it has succeeded."""

    def __init__(self, states: list[int] | None = None) -> None:
        self.calls: list[str] = []
        self.states = states or []
        self.sent: dict[int, bytes] = {}  # what rank 0 has at the next broadcast, by turn
        self.aborted: list[int] = []

    def ncclGetErrorString(self, code: int) -> bytes:
        return f"error {code}".encode()

    def ncclGetUniqueId(self, out: Any) -> int:
        ctypes.memmove(out, IDENTITY, 128)
        return SUCCESS

    def ncclCommInitRankConfig(self, out: Any, size: int, identity: Any, rank: int, config: Any) -> int:
        assert bytes(identity) == IDENTITY
        assert bytes(config._obj)[:20] == (24).to_bytes(8, "little") + bytes.fromhex("efbefeca 98530000 00000000")
        assert ctypes.sizeof(config._obj) == 24
        out._obj.value = 4711
        self.calls.append(f"init {rank} of {size}")
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, comm: Any, out: Any) -> int:
        assert comm.value == 4711
        out._obj.value = self.states.pop(0) if self.states else SUCCESS
        return SUCCESS

    def ncclBroadcast(self, send: Any, out: Any, count: int, dtype: int, root: int, comm: Any, stream: Any) -> int:
        assert (send.value, dtype, root, comm.value, stream.value) == (out.value, 1, 0, 4711, 99)
        ctypes.memset(out, 7, count)
        self.calls.append(f"broadcast {count}")
        return IN_PROGRESS if self.states else SUCCESS

    def ncclCommAbort(self, comm: Any) -> int:
        self.aborted.append(comm.value)
        return SUCCESS


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the next looks at an event find; then it is done. With it, what a GPU needs of torch is played."""
    found: list[bool] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        assert device == GPU
        yield

    event = SimpleNamespace(record=lambda stream: None, query=lambda: found.pop(0) if found else True)
    cuda = SimpleNamespace(
        device=current, Event=lambda: event, current_stream=lambda device: SimpleNamespace(cuda_stream=99)
    )
    monkeypatch.setattr(nccl, "torch", SimpleNamespace(cuda=cuda, device=torch.device, Tensor=torch.Tensor))
    return found


def connected(library: FakeNccl) -> NcclBroadcaster:
    comm = NcclBroadcaster(library, NcclBroadcaster.new_unique_id(library), 1, 3, GPU)
    comm.connect(5)
    return comm


def test_a_broadcast(looks: list[bool]) -> None:
    library = FakeNccl([IN_PROGRESS, IN_PROGRESS, SUCCESS, IN_PROGRESS, SUCCESS])
    comm = connected(library)
    looks += [False, False]
    buffer = torch.zeros(100, dtype=torch.uint8)
    comm.broadcast(buffer[:60], 5)
    assert buffer.tolist() == [7] * 60 + [0] * 40
    assert library.calls == ["init 1 of 3", "broadcast 60"]
    comm.close()
    comm.close()
    assert library.aborted == [4711]


def test_who_is_absent_ends_the_wait(looks: list[bool]) -> None:
    comm = NcclBroadcaster(FakeNccl([IN_PROGRESS] * 10**6), IDENTITY, 1, 2, GPU)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="ncclCommInitRankConfig is not done in time"):
        comm.connect(0.1)
    assert time.monotonic() - started < 60


def test_a_broadcast_that_never_ends(looks: list[bool]) -> None:
    comm = connected(FakeNccl())
    looks += [False] * 10**6
    with pytest.raises(RuntimeError, match="ncclBroadcast is not done in time"):
        comm.broadcast(torch.zeros(8, dtype=torch.uint8), 0.1)


def test_a_lost_connection_is_told_in_nccls_words(looks: list[bool]) -> None:
    library = FakeNccl()
    comm = connected(library)
    looks += [False] * 10
    library.states = [SUCCESS, SUCCESS, REMOTE_ERROR]
    with pytest.raises(RuntimeError, match="ncclBroadcast: error 6"):
        comm.broadcast(torch.zeros(8, dtype=torch.uint8), 5)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of who joins says that there is none."""

    def absent() -> Any:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(weight_group, "load_nccl", absent)
    ranks = [BroadcastGroup("127.0.0.1", 0, 2, 0, "nccl", 5, GPU)]
    ranks.append(BroadcastGroup("127.0.0.1", ranks[0].port, 2, 1, "nccl", 5, GPU))
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(rank.connect) for rank in ranks]
        for one in joining:
            with pytest.raises(InvalidRequestError, match="not joined: libnccl"):
                one.result(20)


def test_the_identity_goes_through_the_store(looks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is sent arrives in pieces, on a rank whose communicator fills every buffer with sevens."""
    libraries = [FakeNccl(), FakeNccl()]
    cpu = torch.device("cpu")
    monkeypatch.setattr(weight_group, "load_nccl", lambda: libraries.pop())
    monkeypatch.setattr(weight_group, "_PIECE_BYTES", 40)
    used = list(libraries)
    ranks = [BroadcastGroup("127.0.0.1", 0, 2, 0, "nccl", 5, GPU)]
    ranks.append(BroadcastGroup("127.0.0.1", ranks[0].port, 2, 1, "nccl", 5, GPU))
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(rank.connect) for rank in ranks]:
            one.result(20)
    assert sorted(library.calls[0] for library in used) == ["init 0 of 2", "init 1 of 2"]
    for rank in ranks:
        assert rank._broadcaster is not None
        rank._broadcaster.device = cpu
    pieces = [(first, rows.clone()) for first, rows in ranks[1].receive("x", [5, 4], torch.float32)]
    assert [(first, tuple(rows.shape)) for first, rows in pieces] == [(0, (2, 4)), (2, (2, 4)), (4, (1, 4))]
    assert all((rows.view(torch.uint8) == 7).all() for _, rows in pieces)
    for rank in ranks:
        rank.close()
    assert [library.aborted for library in used] == [[4711], [4711]]


def test_functions_are_declared_as_nccl_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real library of C; a pointer that ctypes takes for an int would lose its upper half."""
    declared: dict[str, Any] = {}

    class Library:
        def __getitem__(self, name: str) -> Any:
            return declared.setdefault(name, SimpleNamespace())

    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: Library() if name == "libnccl.so.2" else None)
    library = nccl.load_nccl()
    broadcast = library.ncclBroadcast
    assert broadcast.restype is ctypes.c_int
    assert [ctypes.sizeof(kind) for kind in broadcast.argtypes] == [8, 8, 8, 4, 4, 8, 8]
    assert [ctypes.sizeof(kind) for kind in library.ncclCommInitRankConfig.argtypes] == [8, 4, 128, 4, 8]
    assert library.ncclGetErrorString.restype is ctypes.c_char_p
    assert library.ncclCommAbort.argtypes == (ctypes.c_void_p,)
