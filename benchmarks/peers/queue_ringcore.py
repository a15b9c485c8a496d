"""ringcore's own queue, as its executor uses it: one ring to all workers and one back from each, or streams of
encrypted connections over loopback, where every reader is a host of its own.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, ClassVar

import zmq

from benchmarks.peers.queue_loops import FAR, run
from benchmarks.peers.queue_transport import Reader, Writer
from ringcore.config import ParallelConfig
from ringcore.config.admin_keys import ClientKeys, KnownClient, ServerKeys
from ringcore.executor.far.ends import HostListener, JoiningEnd
from ringcore.executor.far.frames import Join
from ringcore.executor.message_queue import MessageReader, MessageWriter, queue_writer
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.value_codec import Buffer, decode_value, encode_value
from ringcore.executor.waiting import DeadlinePassed, spin_budget_s

JOIN_S = 60.0
_HEADER = struct.Struct("<BxxxxxxxQ")  # op, number of the call


class Fds(dict[str, int]):
    """Descriptors by name; a process that is started with them inherits them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, ({name: DupFd(fd) for name, fd in self.items()},)


def _taken(copies: Mapping[str, Any]) -> dict[str, int]:
    return {name: copy.detach() for name, copy in copies.items()}


def _packed(header: bytes, value: Any) -> list[Buffer]:
    """As the executor's messages: a header before the body."""
    body, *buffers = encode_value(value)
    return [header + body, *buffers]


def _unpacked(parts: Sequence[memoryview]) -> Any:
    return decode_value([parts[0][_HEADER.size :], *parts[1:]])


Ends = tuple[MessageReader, MessageWriter]


def _near_ends(index: int, deaths: Sequence[int], spin_s: float, calls: Fds, replies: Fds) -> Ends:
    reader = NearReader(QueueHandle.from_fds(calls), index, deaths, spin_s)
    return reader, NearWriter(QueueHandle.from_fds(replies), deaths, spin_s)


def _far_ends(index: int, deaths: Sequence[int], spin_s: float, endpoint: str, keys: ClientKeys) -> Ends:
    link = JoiningEnd(endpoint, keys).link
    link.note(Join(_host(index), ""))
    sizes = ParallelConfig()
    reader = link.reader(0, sizes.call_ring_bytes, deaths, spin_s)
    return reader, link.writer(0, sizes.reply_ring_bytes, deaths, spin_s)


def _host(index: int) -> str:
    return f"host {index}"


class RingReader(Reader):
    """told: the function that makes its ends, how long to spin, and the function's further arguments."""

    def __init__(self, index: int, told: Any) -> None:
        make_ends, spin_s, *more = told
        parent = mp.parent_process()
        assert parent is not None
        self._calls, self._replies = make_ends(index, [parent.sentinel], spin_s, *more)

    def take(self, look: Callable[[Any], Any]) -> tuple[int, Any]:
        with self._calls.receive() as parts:
            self._header = bytes(parts[0][: _HEADER.size])
            # A large payload is looked at where it lies; decode_value would copy it out, for who wants to keep it.
            return self._header[0], look(parts[1] if len(parts) > 1 else _unpacked(parts))

    def reply(self, value: Any) -> None:
        self._replies.send(_packed(self._header, value))


class RingWriter(Writer):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "msgspec", "numpy")
    reader = RingReader
    _queues: Sequence[QueueHandle] = ()
    _listener: HostListener | None = None
    _call_id = 0

    def load(self, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._spin_s = spin_budget_s(1 + settings["readers"])  # as where the executor runs, which is bound to no core
        return super().load(model, settings)

    def open(self, num_readers: int) -> list[Any]:
        transport = self._settings["transport"]
        return self._open_far(num_readers) if transport == FAR else self._open_near(num_readers, transport)

    def _open_near(self, num_readers: int, large_messages: str) -> list[Any]:
        sizes = ParallelConfig()
        calls = create_queue(self._settings["call_ring_bytes"], num_readers, large_messages)
        backs = [create_queue(sizes.reply_ring_bytes, 1, large_messages) for _ in range(num_readers)]
        self._queues = [calls, *backs]
        fds = [(Fds(calls.fds_of_reader(index)), Fds(back.fds_of_writer())) for index, back in enumerate(backs)]
        return [(_near_ends, self._spin_s, *ends) for ends in fds]

    def _open_far(self, num_readers: int) -> list[Any]:
        (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        keys = ServerKeys(server_secret, {client: KnownClient("readers", frozenset(), "")})
        self._listener = HostListener("tcp://127.0.0.1:*", keys, lambda join: None)
        told = (_far_ends, self._spin_s, self._listener.address, ClientKeys(server, client, client_secret))
        return [told] * num_readers

    def connect(self, greetings: Sequence[Any], deaths: Sequence[int]) -> None:
        if self._listener is None:
            calls, *backs = self._queues
            self._calls: MessageWriter = NearWriter(calls, deaths, self._spin_s)
            self._replies: list[MessageReader] = [NearReader(back, 0, deaths, self._spin_s) for back in backs]
            return
        sizes, names = ParallelConfig(), [_host(index) for index in range(len(greetings))]
        found = self._listener.wait_for(names, time.monotonic() + JOIN_S)
        links = [found[name] for name in names]
        self._calls = queue_writer([link.writer(0, sizes.call_ring_bytes, deaths) for link in links], deaths)
        self._replies = [link.reader(0, sizes.reply_ring_bytes, deaths, self._spin_s) for link in links]

    def send(self, op: int, argument: Any) -> None:
        self._call_id += 1
        self._calls.send(_packed(_HEADER.pack(op, self._call_id), argument))

    def gather(self, timeout_s: float | None = None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        values = []
        try:
            for replies in self._replies:
                with replies.receive(deadline) as parts:
                    values.append(_unpacked(parts))
        except DeadlinePassed:
            raise TimeoutError from None
        return values

    def close(self) -> None:
        super().close()
        for queue in self._queues:
            queue.close()
        self._queues = ()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


if __name__ == "__main__":
    run(RingWriter())
