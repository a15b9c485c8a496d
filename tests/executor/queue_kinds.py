"""A message queue of each kind, with both of its ends in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import zmq

from ringcore.config.admin_keys import ClientKeys, KnownClient, ServerKeys
from ringcore.executor.far.ends import HostListener, JoiningEnd
from ringcore.executor.far.frames import Join
from ringcore.executor.message_queue import MessageReader, MessageWriter, queue_writer
from ringcore.executor.near_queue import NearReader, NearWriter, create_queue

BOUND_S = 60.0  # of what takes milliseconds on a machine that is not overloaded


def made_keys() -> tuple[ServerKeys, ClientKeys]:
    """Keys of an engine and of one client that it knows."""
    server, server_secret = zmq.curve_keypair()
    client, client_secret = zmq.curve_keypair()
    known = KnownClient("host", frozenset(), "host.key")
    return ServerKeys(server_secret, {client: known}), ClientKeys(server, client, client_secret)


@contextlib.contextmanager
def joined(num_hosts: int, server_keys: ServerKeys, client_keys: ClientKeys):
    """The engine's links to so many hosts, and the hosts' own ends."""
    listener = HostListener("tcp://127.0.0.1:*", server_keys, lambda join: None)
    names = [f"host {i}" for i in range(num_hosts)]
    ends = [JoiningEnd(listener.address, client_keys) for _ in names]
    try:
        for name, end in zip(names, ends, strict=True):
            end.link.note(Join(name, "0"))
        links = listener.wait_for(names, time.monotonic() + BOUND_S)
        yield listener, [links[name] for name in names], ends
    finally:
        for end in ends:
            end.close()
        listener.close()


class Queue:
    def __init__(self, writer: MessageWriter, readers: list[MessageReader]) -> None:
        self.writer, self.readers = writer, readers

    def receive(self, index: int = 0) -> list[bytes]:
        with self.readers[index].receive(time.monotonic() + BOUND_S) as parts:
            return [bytes(part) for part in parts]

    def receive_at_once(self, index: int = 0) -> list[bytes] | None:
        message = self.readers[index].try_receive()
        if message is None:
            return None
        with message as parts:
            return [bytes(part) for part in parts]

    def fill(self, size: int) -> int:
        """Sends messages of so many bytes until there is no room, also for what was under way; how many were sent."""
        num_sent, refused_s = 0, 0.0
        while refused_s == 0.0 or time.monotonic() < refused_s + 0.02:
            if self.writer.try_send([bytes(size)]):
                num_sent, refused_s = num_sent + 1, 0.0
            elif refused_s == 0.0:
                refused_s = time.monotonic()
        return num_sent


@contextlib.contextmanager
def queue_of(kind: str, capacity: int, deaths: tuple[int, ...] = ()) -> Iterator[Queue]:
    """A queue of two readers. kind: "memfd", "named" or "zmq" (both near), "far" (both), or "mixed": near, then far."""
    num_near = {"far": 0, "mixed": 1}.get(kind, 2)
    large_messages = "zmq" if kind == "zmq" else "memfd"
    with contextlib.ExitStack() as stack:
        writers: list[MessageWriter] = []
        readers: list[MessageReader] = []
        if num_near:
            handle = create_queue(capacity, num_near, large_messages)
            stack.callback(handle.close)
            writers.append(NearWriter(handle, deaths))
            readers += [NearReader(handle, i, deaths) for i in range(num_near)]
        _, links, ends = stack.enter_context(joined(2 - num_near, *made_keys()))
        for link, end in zip(links, ends, strict=True):
            writers.append(link.writer(0, capacity, deaths))
            readers.append(end.link.reader(0, capacity, deaths))
        queue = Queue(queue_writer(writers, deaths), readers)
        for one in (queue.writer, *readers):
            stack.callback(one.close)
        yield queue
