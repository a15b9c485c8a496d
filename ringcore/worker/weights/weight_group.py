"""A process group in which a trainer broadcasts tensors to the workers of an engine.

The ranks rendezvous at a TCP store that rank 0, the trainer, opens at an address and port of its choice; any process
that reaches the port can join, so bind it to this host or a private network. Each tensor is then broadcast from rank 0
in chunks of whole rows, of at most 64 MiB, which bounds the memory on both sides. Names, shapes and dtypes are sent on
the control channel (`WeightGroup.describe`), in the order of the broadcasts.
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
    """Broadcasts bytes from rank 0 to all others. Raises RuntimeError after the timeout."""

    device: torch.device  # of the buffers

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor) -> None:
        """buffer: [n] uint8, sent by rank 0, received by the others. Synchronous."""

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
    """One rank of `world_size`; rank 0 sends. On any failure this rank closes its side of the group, and the others
    fail at their next send or receive. Every method raises `InvalidRequestError` that says what failed."""

    def __init__(
        self, address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float, device: torch.device
    ) -> None:
        """Rank 0 listens on `port` of `address` (0: any free port); the others do nothing before `connect`.

        timeout_s: of `connect`, and of each chunk. device: a rank's GPU, for "nccl".
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
        """Passes the store a listening socket: by itself it would listen on every address of the host."""
        try:
            family = socket.getaddrinfo(self._address, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((self._address, port), family=family, backlog=128)
        except OSError as error:
            raise self._error(f"cannot listen there: {error.strerror or error}") from error
        self.port = listener.getsockname()[1]
        # The store owns the file descriptor from here on.
        self._store = self._open_store(is_master=True, master_listen_fd=listener.detach())

    def _open_store(self, **options: Any) -> Any:
        timeout = timedelta(seconds=self._timeout_s)
        return TCPStore(self._address, self.port, None, timeout=timeout, wait_for_workers=False, **options)

    def connect(self) -> None:
        """Returns when all ranks have joined and connected. Idempotent."""
        if self._broadcaster is not None:
            return
        deadline = time.monotonic() + self._timeout_s
        try:
            if self._store is None:
                self._wait_for_port(deadline)
                self._store = self._open_store(is_master=False)
            store = PrefixStore("ringcore/weights", self._store)
            self._wait_for_ranks(store, deadline)
            self._broadcaster = self._new_broadcaster(store)
        except (RuntimeError, OSError) as error:  # torch's errors of stores and of groups are RuntimeErrors
            self.close()
            raise self._error(f"not joined: {_first_line(error)}") from error
        except InvalidRequestError:
            self.close()
            raise

    def _wait_for_port(self, deadline: float) -> None:
        """Polls rank 0's port: the store's own retries fill the log with stack traces."""
        while True:
            try:
                socket.create_connection((self._address, self.port), max(0.01, deadline - time.monotonic())).close()
            except OSError as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise self._error(
                        f"rank 0 did not listen there within {self._timeout_s:g} s ({error.strerror or error}); make "
                        "the trainer's WeightGroup first"
                    ) from error
                time.sleep(_RETRY_S)
            else:
                return

    def _wait_for_ranks(self, store: Any, deadline: float) -> None:
        """A barrier that names missing ranks, which NCCL's own does not."""
        own_key = f"joined/{self._rank}"
        if store.add(own_key, 1) != 1:
            raise self._error(
                f"rank {self._rank} is taken; every rank joins once, as another one of 0 to {self._size - 1}"
            )
        while missing := [rank for rank in range(self._size) if not store.add(f"joined/{rank}", 0)]:
            if time.monotonic() >= deadline:
                store.add(own_key, -1)
                raise self._error(f"ranks {missing} did not join within {self._timeout_s:g} s")
            time.sleep(_RETRY_S)

    def _new_broadcaster(self, store: Any) -> Broadcaster:
        if self._backend == "gloo":
            return _Gloo(store, self._rank, self._size, self._address, self._timeout_s)
        return _Nccl(store, self._rank, self._size, self._device, self._timeout_s)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """On rank 0: broadcasts the tensors in order; connects first if necessary."""
        assert self._rank == 0, self._rank
        self.connect()
        for name, tensor in tensors.items():
            for first, end in row_pieces(tensor.shape, tensor.itemsize, _PIECE_BYTES):
                rows = tensor.detach()[first:end].to(self._joined.device).contiguous()
                self._broadcast(name, rows.view(torch.uint8).flatten())

    def receive(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """On other ranks: yields the next tensor in chunks (index of the first row, rows [n, ...]). A chunk is valid
        until the next one is requested."""
        for first, end in row_pieces(shape, dtype.itemsize, _PIECE_BYTES):
            rows = torch.Size((end - first, *shape[1:]))
            chunk = self._receive_buffer(rows.numel() * dtype.itemsize)
            self._broadcast(name, chunk)
            yield first, chunk.view(dtype).view(rows)

    @property
    def _joined(self) -> Broadcaster:
        if self._broadcaster is None:
            raise InvalidRequestError("no group is joined; join one first", field="method", value="join_weight_group")
        return self._broadcaster

    def _receive_buffer(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, reused for every chunk."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._joined.device)
        return self._buffer[:num_bytes]

    def _broadcast(self, name: str, buffer: torch.Tensor) -> None:
        try:
            self._joined.broadcast(buffer)
        except RuntimeError as error:
            self.close()
            raise self._error(
                f"tensor {name!r} was not broadcast: {_first_line(error)}; a rank has ended, failed or waits for "
                "another tensor: join a new group"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        broadcaster, self._broadcaster = self._broadcaster, None
        self._store = self._buffer = None
        if broadcaster is not None:
            broadcaster.close()

    def _error(self, what: str) -> InvalidRequestError:
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
    """This host's address on the route to `address`."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    found = str(target[0])
    if ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        return found
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
