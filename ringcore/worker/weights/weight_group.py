"""Tensors broadcast by a trainer to the workers of an engine, one after the other.

The ranks meet at a store that rank 0, the trainer, keeps at an address and port of its choice; whoever reaches the port
can join, so it is one of this host or of a private network. Then each tensor goes from rank 0 to all others in pieces
of whole rows, of at most 64 MiB: neither side needs memory for more, however large a tensor is. What a tensor's name,
shape and dtype are is told beside it (`WeightGroup.describe`), in the order of sending.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from ringcore.distributed.nccl import NcclBroadcaster, load_nccl
from ringcore.errors import InvalidRequestError
from ringcore.model_executor.weight_update import row_pieces
from ringcore.params.field_checks import is_timeout

__all__ = ["BACKENDS", "BroadcastGroup"]

BACKENDS = ("nccl", "gloo")
_PIECE_BYTES = 64 << 20
_RETRY_S = 0.05


class Broadcaster(ABC):
    """How bytes go from rank 0 to all others. Raises RuntimeError where they do not arrive in time."""

    device: torch.device  # where they must lie

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor) -> None:
        """buffer: [n] uint8, sent by rank 0 and received by the others; returns when it is done."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class _Gloo(Broadcaster):
    device = torch.device("cpu")

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address))]
        options._timeout = timedelta(seconds=timeout_s)  # of connecting, and of each broadcast
        self._group: Any = ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, buffer: torch.Tensor) -> None:
        assert self._group is not None, "closed"
        self._group.broadcast(buffer, 0).wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


class _Nccl(Broadcaster):
    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        library = load_nccl()
        if rank == 0:
            store.set("nccl", NcclBroadcaster.new_unique_id(library))
        self.device, self._timeout_s = device, timeout_s
        self._comm = NcclBroadcaster(library, store.get("nccl"), rank, size, device)
        try:
            self._comm.connect(timeout_s)
        except BaseException:
            self._comm.close()
            raise

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._comm.broadcast(buffer, self._timeout_s)

    def close(self) -> None:
        self._comm.close()


class BroadcastGroup:
    """One rank among `world_size`; rank 0 sends. Where anything fails the group is closed, on this rank, and the others
    see it when they send or receive next. Every method raises `InvalidRequestError` that says what failed."""

    def __init__(
        self, address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float, device: torch.device
    ) -> None:
        """Rank 0 opens its port at `address`, 0 for any; the others look for nobody before `connect`.

        timeout_s: of `connect`, and of each piece. device: where a rank's tensors of "nccl" lie, a GPU.
        """
        _check_arguments(address, port, world_size, rank, backend, timeout_s, device)
        self._address, self._size, self._rank, self._backend = address, world_size, rank, backend
        self._timeout_s, self._device = timeout_s, device
        self._store: Any = None
        self._broadcaster: Broadcaster | None = None
        self._buffer: torch.Tensor | None = None
        self.port = port
        if rank == 0:
            self._listen(port)

    def _listen(self, port: int) -> None:
        """A store would listen on every address of the host; so it is given a socket that listens on one."""
        try:
            family = socket.getaddrinfo(self._address, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((self._address, port), family=family, backlog=128)
        except OSError as error:
            raise self._failed(f"cannot listen there: {error.strerror or error}") from error
        self.port = listener.getsockname()[1]
        # The descriptor is the store's from here on.
        self._store = self._open_store(is_master=True, master_listen_fd=listener.detach())

    def _open_store(self, **options: Any) -> Any:
        timeout = timedelta(seconds=self._timeout_s)
        return TCPStore(self._address, self.port, None, timeout=timeout, wait_for_workers=False, **options)

    def connect(self) -> None:
        """Returns when all ranks are here and connected. Idempotent."""
        if self._broadcaster is not None:
            return
        deadline = time.monotonic() + self._timeout_s
        try:
            if self._store is None:
                self._reach(deadline)
                self._store = self._open_store(is_master=False)
            store = PrefixStore("ringcore/weights", self._store)
            self._meet(store, deadline)
            self._broadcaster = self._new_broadcaster(store)
        except (RuntimeError, OSError) as error:  # torch's errors of stores and of groups are RuntimeErrors
            self.close()
            raise self._failed(f"not joined: {_first_line(error)}") from error
        except InvalidRequestError:
            self.close()
            raise

    def _reach(self, deadline: float) -> None:
        """Waits for rank 0's port by ourselves: the store's own attempts fill the log with stacks."""
        while True:
            try:
                socket.create_connection((self._address, self.port), max(0.01, deadline - time.monotonic())).close()
            except OSError as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise self._failed(
                        f"rank 0 did not listen there within {self._timeout_s:g} s ({error.strerror or error}); make "
                        "the trainer's WeightGroup first"
                    ) from error
                time.sleep(_RETRY_S)
            else:
                return

    def _meet(self, store: Any, deadline: float) -> None:
        """NCCL connects without a word on who is absent: so all say here that they are there, and wait for the rest."""
        mine = f"joined/{self._rank}"
        if store.add(mine, 1) != 1:
            raise self._failed(
                f"rank {self._rank} is taken; every rank joins once, as another one of 0 to {self._size - 1}"
            )
        while absent := [rank for rank in range(self._size) if not store.add(f"joined/{rank}", 0)]:
            if time.monotonic() >= deadline:
                store.add(mine, -1)
                raise self._failed(f"ranks {absent} did not join within {self._timeout_s:g} s")
            time.sleep(_RETRY_S)

    def _new_broadcaster(self, store: Any) -> Broadcaster:
        if self._backend == "gloo":
            return _Gloo(store, self._rank, self._size, self._address, self._timeout_s)
        return _Nccl(store, self._rank, self._size, self._device, self._timeout_s)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0: broadcasts them in their order, having connected if it has not."""
        assert self._rank == 0, self._rank
        self.connect()
        for name, tensor in tensors.items():
            for first, end in row_pieces(tensor.shape, tensor.itemsize, _PIECE_BYTES):
                rows = tensor.detach()[first:end].to(self._joined.device).contiguous()
                self._broadcast(name, rows.view(torch.uint8).flatten())

    def receive(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """The others: (the number of the first row, rows [n, ...]) of the next tensor, piece by piece. A piece is valid
        until the next one is asked for."""
        for first, end in row_pieces(shape, dtype.itemsize, _PIECE_BYTES):
            rows = torch.Size((end - first, *shape[1:]))
            piece = self._room(rows.numel() * dtype.itemsize)
            self._broadcast(name, piece)
            yield first, piece.view(dtype).view(rows)

    @property
    def _joined(self) -> Broadcaster:
        if self._broadcaster is None:
            raise InvalidRequestError("no group is joined; join one first", field="method", value="join_weight_group")
        return self._broadcaster

    def _room(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 that is used again and again."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._joined.device)
        return self._buffer[:num_bytes]

    def _broadcast(self, name: str, buffer: torch.Tensor) -> None:
        try:
            self._joined.broadcast(buffer)
        except RuntimeError as error:
            self.close()
            raise self._failed(
                f"tensor {name!r} was not broadcast: {_first_line(error)}; a rank has ended, failed or waits for "
                "another tensor: join a new group"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        broadcaster, self._broadcaster = self._broadcaster, None
        self._store = self._buffer = None
        if broadcaster is not None:
            broadcaster.close()

    def _failed(self, what: str) -> InvalidRequestError:
        where = f"weight group at {self._address}:{self.port}, rank {self._rank} of {self._size}"
        return InvalidRequestError(f"{where}: {what}", field="address", value=f"{self._address}:{self.port}")


def _check_arguments(
    address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float, device: torch.device
) -> None:
    for name, value, is_right, remedy in (
        ("address", address, bool(address), "give an address of the trainer's host, 127.0.0.1 where it is this one"),
        ("port", port, 0 <= port < 1 << 16 and (port or rank == 0), "give the port of the trainer's group"),
        ("world_size", world_size, world_size >= 2, "the trainer is rank 0, and every worker one more"),
        ("rank", rank, 0 <= rank < world_size, f"give one of 0 to {world_size - 1}"),
        ("backend", backend, backend in BACKENDS, f"give one of {', '.join(map(repr, BACKENDS))}"),
        ("timeout_s", timeout_s, is_timeout(timeout_s) and timeout_s > 0, "give a positive number of seconds"),
    ):
        if not is_right:
            raise InvalidRequestError(f"{name}={value!r}: {remedy}", field=name, value=value)
    if backend == "nccl" and device.type != "cuda":
        raise InvalidRequestError(
            f"backend='nccl': this rank computes on {device}; give 'gloo'", field="backend", value=backend
        )


def _own_address(address: str) -> str:
    """This host's address as `address` sees it: that of the way there."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    found = str(target[0])
    if ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        return found
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
