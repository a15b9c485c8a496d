"""What a transport is: a `Writer`, whose process serves the commands load, block and death, and a `Reader` in each of
the processes that it starts.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from benchmarks.peers.queue_loops import WORK, Caller, Row, look, pinned_core

__all__ = ["Reader", "Writer"]

PUSH, COUNT, DIE = 3, 4, 5  # more of what a message asks of a reader
NUM_ONE_WAY, ONE_WAY_BYTES = 20_000, 1000
DEATH_TIMEOUT_S = 1.0


class Reader(ABC):
    """A reader's end."""

    greeting: Any = None  # told to the writer before `connect`

    @abstractmethod
    def __init__(self, index: int, told: Any) -> None: ...

    def connect(self) -> None:  # noqa: B027 - most are connected as they are made
        """Waits until the writer is there."""

    @abstractmethod
    def take(self, look: Callable[[Any], Any]) -> tuple[int, Any]:
        """The next message: its op, and what `look` made of its argument while the message was on lease."""

    @abstractmethod
    def reply(self, value: Any) -> None: ...


def _read(kind: type[Reader], index: int, told: Any, core: int | None, writer: Any) -> None:
    """A reader's process."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})
    end = kind(index, told)
    writer.send(end.greeting)
    end.connect()
    writer.send("ready")
    count = 0
    while True:
        op, seen = end.take(look)
        if op == PUSH:
            count += 1
            if seen[:2] != [count, ONE_WAY_BYTES]:
                raise RuntimeError(f"message {count} arrived as {seen}: lost, doubled, out of order or cut")
            continue
        if op == WORK:
            time.sleep(seen)
        elif op == DIE and seen == index:
            os.kill(os.getpid(), signal.SIGKILL)
        end.reply(count if op == COUNT else seen)
        if op == COUNT:
            count = 0


def _leave_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


class Writer(Caller):
    """The writer's end of a transport: a queue to all readers, and one back from each."""

    reader: ClassVar[type[Reader]]

    def __init__(self) -> None:
        super().__init__()
        self._cores = sorted(os.sched_getaffinity(0))
        self._readers: list[Any] = []

    @abstractmethod
    def open(self, num_readers: int) -> list[Any]:
        """Makes the queues, in a process bound to its core. What each reader's constructor is told."""

    @abstractmethod
    def connect(self, greetings: Sequence[Any], deaths: Sequence[int]) -> None:
        """Takes what the readers said first, and for each a descriptor that becomes readable when it ends."""

    @abstractmethod
    def send(self, op: int, argument: Any) -> None: ...

    @abstractmethod
    def gather(self, timeout_s: float | None = None) -> list[Any]:
        """One reply of each reader. Raises TimeoutError after `timeout_s`, any other error where a reader ended."""

    def commands(self) -> dict[str, Callable[..., Any]]:
        return super().commands() | {"death": self.death}

    def start(self) -> None:
        num_readers, cores = self._settings["readers"], self._cores
        if self._settings["pin"]:
            os.sched_setaffinity(0, cores[:1])
        told = self.open(num_readers)
        context, connections = mp.get_context("spawn"), []
        for index in range(num_readers):
            core = pinned_core(index, cores) if self._settings["pin"] else None
            ours, theirs = context.Pipe()
            arguments = (self.reader, index, told[index], core, theirs)
            self._readers.append(context.Process(target=_read, args=arguments, daemon=True))
            self._readers[-1].start()
            theirs.close()
            connections.append(ours)
        self.connect([ours.recv() for ours in connections], [process.sentinel for process in self._readers])
        for ours in connections:
            ours.recv()
            ours.close()

    def ask(self, op: int, argument: Any) -> list[Any]:
        self.send(op, argument)
        return self.gather()

    def pids(self) -> list[int]:
        return [process.pid for process in self._readers]

    def close(self) -> None:
        for process in self._readers:
            process.kill()
            process.join()
        self._readers = []

    def more(self) -> list[Row]:
        count, rest = max(2, int(NUM_ONE_WAY * self._scale)), bytes(ONE_WAY_BYTES - 8)
        began_s = time.perf_counter()
        for number in range(1, count + 1):
            self.send(PUSH, number.to_bytes(8, "little") + rest)
        counts = self.ask(COUNT, None)
        took_s = time.perf_counter() - began_s
        if any(received != count for received in counts):
            raise RuntimeError(f"{count} messages were sent; {counts} arrived")
        return [("1,000 B one way", "messages/s", count / took_s)]

    def death(self) -> float | None:
        """Milliseconds from the message that kills a reader to the writer's error; None where there was none.

        The readers it leaves are not to be measured.
        """
        self.close()
        self.start()
        self._trip(64)
        began_s = time.perf_counter()
        self.send(DIE, 0)
        try:
            self.gather(DEATH_TIMEOUT_S)
        except TimeoutError:
            return None
        except Exception:
            return (time.perf_counter() - began_s) * 1e3
        raise RuntimeError("a reader that had been killed has replied")
