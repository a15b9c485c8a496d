"""ringcore's own queue, as its executor uses it: one ring to all workers, one back from each."""

from __future__ import annotations

import multiprocessing as mp
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, ClassVar

from benchmarks.peers.queue_loops import run
from benchmarks.peers.queue_transport import Reader, Writer
from ringcore.config import ParallelConfig
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.value_codec import Buffer, decode_value, encode_value
from ringcore.executor.waiting import DeadlinePassed, spin_budget_s

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


class RingReader(Reader):
    def __init__(self, index: int, told: Any) -> None:
        calls, replies, spin_s = told
        parent = mp.parent_process()
        assert parent is not None
        self._calls = NearReader(QueueHandle.from_fds(calls), index, [parent.sentinel], spin_s)
        self._replies = NearWriter(QueueHandle.from_fds(replies), [parent.sentinel], spin_s)

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
    _call_id = 0

    def load(self, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._spin_s = spin_budget_s(1 + settings["readers"])  # as where the executor runs, which is bound to no core
        return super().load(model, settings)

    def open(self, num_readers: int) -> list[Any]:
        sizes = ParallelConfig()
        calls = create_queue(sizes.call_ring_bytes, num_readers)
        backs = [create_queue(sizes.reply_ring_bytes, 1) for _ in range(num_readers)]
        self._queues = [calls, *backs]
        fds = [(Fds(calls.fds_of_reader(index)), Fds(back.fds_of_writer())) for index, back in enumerate(backs)]
        return [(*ends, self._spin_s) for ends in fds]

    def connect(self, greetings: Sequence[Any], deaths: Sequence[int]) -> None:
        calls, *backs = self._queues
        self._calls = NearWriter(calls, deaths, self._spin_s)
        self._replies = [NearReader(back, 0, deaths, self._spin_s) for back in backs]

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


if __name__ == "__main__":
    run(RingWriter())
