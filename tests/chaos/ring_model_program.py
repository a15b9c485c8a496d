"""What a writer and its readers do in the model, as graphs whose nodes are the places where they touch shared memory.

The operations are those of `message_queue` with its waits, one after the other as there: a writer that finds no room
sleeps for a tick or until the space event, and tries again; a reader that finds nothing looks again, spinning, as often
as it likes, and then sleeps until its own event, without any tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ring_model_code import LINE, Access, Paused, RingCode
from ring_model_memory import Violation

__all__ = ["Programs", "Scenario"]

Counter = tuple[Any, ...]  # a program counter: what to do next, with which message, and what the step before left


@dataclass(frozen=True)
class Scenario:
    """Who sends what through which ring.

    messages: for each its parts' sizes in bytes, of up to 12 parts.
    asked: the messages before which the writer asks `has_room`, as before a large one of the side channel.
    start_line: where in its first lap the ring is, with nothing in it, when the model begins.
    leaving: after how many messages a reader closes, where it does not stay to the end.
    may_spin: whether readers spin more than once.
    """

    messages: tuple[tuple[int, ...], ...]
    num_readers: int = 1
    num_lines: int = 4
    start_line: int = 0
    restart_bytes: int = 2 * LINE
    may_spin: bool = True
    asked: frozenset[int] = frozenset()
    leaving: tuple[int | None, ...] = ()

    def parts(self, message: int) -> list[bytes]:
        return [
            bytes((16 * message + 4 * part + at // LINE + 1) & 255 for at in range(size))
            for part, size in enumerate(self.messages[message])
        ]

    def record_bytes(self, message: int) -> int:
        return LINE * (1 + sum(-(-size // LINE) for size in self.messages[message]))

    def stays(self, reader: int) -> int | None:
        return self.leaving[reader] if reader < len(self.leaving) else None


class Programs:
    """The participants' graphs, made as they are walked. Participant 0 is the writer, 1 + i is reader i.

    access: what each node is about to do; None for one that has done everything.
    seen: which remarkable things happened: wrap, restart, refused, idle, closed, cut.
    """

    def __init__(self, code: RingCode, scenario: Scenario) -> None:
        self._code, self._scenario = code, scenario
        self._nodes: list[tuple[int, Counter, tuple[Any, ...], tuple[Any, ...]]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._lists = [{name for name, value in vars(end).items() if isinstance(value, list)} for end in code.ends]
        self.access: list[Access | None] = []
        self.partners: list[int | None] = []
        self.seen: set[str] = set()
        reader_first: Counter = ("look", 0)
        self.first = tuple(
            self._node(i, self._send_next(0) if i == 0 else reader_first, self._attributes(i), ())
            for i in range(len(code.ends))
        )

    def participant(self, node: int) -> int:
        return self._nodes[node][0]

    def count(self, node: int) -> int:
        """How many messages the participant has sent or received."""
        return self._nodes[node][1][1]

    def follow(self, node: int, result: Any) -> int:
        """The node after this access has had this result. Raises `Violation` where the code fails."""
        participant, counter, attributes, results = self._nodes[node]
        return self._node(participant, counter, attributes, (*results, result))

    def _node(self, participant: int, counter: Counter, attributes: tuple[Any, ...], results: tuple[Any, ...]) -> int:
        key = (participant, counter, attributes, results)
        number = self._numbers.get(key)
        if number is not None:
            return number
        access: Access | None = None
        if counter[0] != "done":
            self._restore(participant, attributes)
            self._code.port.replay(results)
            try:
                after = self._operation(participant, counter)
            except Paused as paused:
                access = paused.access
            except Exception as error:
                raise Violation(f"{self._name(participant)} at {counter[:2]}: {error!r}") from error
            else:
                number = self._numbers[key] = self._node(participant, after, self._attributes(participant), ())
                return number
        number = self._numbers[key] = len(self._nodes)
        self._nodes.append(key)
        self.access.append(access)
        alone = None if access is None or participant else self._code.layout.partner(access)
        self.partners.append(alone)
        return number

    def _name(self, participant: int) -> str:
        return f"reader {participant - 1}" if participant else "the writer"

    def _attributes(self, participant: int) -> tuple[Any, ...]:
        values = sorted(vars(self._code.ends[participant]).items())
        return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values)

    def _restore(self, participant: int, attributes: tuple[Any, ...]) -> None:
        lists, own = self._lists[participant], vars(self._code.ends[participant])
        own.clear()
        own.update((name, list(value) if name in lists else value) for name, value in attributes)

    def _operation(self, participant: int, counter: Counter) -> Counter:
        end = self._code.ends[participant]
        if participant == 0:
            operations: dict[str, Callable[..., Counter]] = {
                "ask": self._ask,
                "send": self._send,
                "asleep": self._sleep,
                "close": self._close,
            }
        else:
            operations = {
                "look": self._look,
                "spin": self._spin,
                "peek": self._peek,
                "asleep": self._wait,
                "lease": self._lease,
                "close": self._close,
            }
        return operations[counter[0]](end, participant, *counter[1:])

    # The writer's operations. `message` is the one to send next.

    def _send_next(self, message: int) -> Counter:
        if message == len(self._scenario.messages):
            return "close", message
        return "ask" if message in self._scenario.asked else "send", message

    def _ask(self, end: Any, participant: int, message: int) -> Counter:
        try:
            has_room = end.has_room(self._scenario.messages[message])
        except self._code.ring.RingClosed:
            return self._cut(message)
        return ("send", message, True) if has_room else ("asleep", message)

    def _send(self, end: Any, participant: int, message: int, was_promised: bool = False) -> Counter:
        before = self._code.published()
        try:
            is_sent = end.try_write(1 + message, self._scenario.parts(message))
        except self._code.ring.RingClosed:
            return self._cut(message)
        if not is_sent:
            assert not was_promised, "there was room for this record"
            self.seen.add("refused")
            return "asleep", message
        need = self._scenario.record_bytes(message)
        if self._code.published() - before > need:
            self.seen.add("wrap" if before % self._code.capacity + need > self._code.capacity else "restart")
        return self._send_next(message + 1)

    def _cut(self, message: int) -> Counter:
        assert any(stays is not None for stays in self._scenario.leaving), "nobody has closed the ring"
        self.seen.add("cut")
        return "close", message

    def _sleep(self, end: Any, participant: int, message: int) -> Counter:
        self._code.port.sleep(self._code.space_event)
        return self._send_next(message)

    # A reader's operations. `message` is the one to receive next.

    def _look(self, end: Any, participant: int, message: int) -> Counter:
        try:
            record = end.try_read()
        except self._code.ring.RingClosed:
            self.seen.add("closed")
            return "close", message
        if record is None:
            return "spin", message
        kind, parts = record
        assert kind == 1 + message, f"message {kind - 1} came in place of {message}"
        sizes = tuple(map(len, parts))
        assert sizes == self._scenario.messages[message], f"message {message} came as parts of {sizes} bytes"
        return "lease", message, tuple(parts)

    def _spin(self, end: Any, participant: int, message: int) -> Counter:
        if end.spin(until=0.0):
            return "look", message
        if self._scenario.may_spin and self._code.port.choose(2):
            return "spin", message
        return "peek", message

    def _peek(self, end: Any, participant: int, message: int) -> Counter:
        if end.has_record():
            return "look", message
        self.seen.add("idle")
        return "asleep", message

    def _wait(self, end: Any, participant: int, message: int) -> Counter:
        self._code.port.wait(participant - 1)
        return "peek", message

    def _lease(self, end: Any, participant: int, message: int, parts: tuple[Any, ...]) -> Counter:
        for part, expected in zip(parts, self._scenario.parts(message), strict=True):
            self._code.port.check(part, expected)
        end.release()
        leaves = self._scenario.stays(participant - 1) == message + 1
        return "close" if leaves else "look", message + 1

    def _close(self, end: Any, participant: int, message: int) -> Counter:
        end.close()
        return "done", message
