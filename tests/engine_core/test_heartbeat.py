"""When a client takes its engine for hung: a process of paper, a real page, and a clock of the test's."""

from __future__ import annotations

import os
import signal

import pytest

from ringcore.engine_core.heartbeat import EngineWatchdog
from ringcore.executor.status_board import StatusBoard, StatusLine, create_board
from ringcore.executor.unchanged import UnchangedFor

TIMEOUT_S = 8.0
PERIOD_S = 1.0


class PaperProcess:
    name, pid = "engine", 4711

    def __init__(self) -> None:
        self.state, self.signals = "sleeping", []

    def process_state(self) -> str:
        return self.state

    def is_alive(self) -> bool:
        return not self.signals

    def python_stacks(self) -> str:
        return "in a file, at a line"

    def last_log(self) -> list[str]:
        return ["said this"]

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Watched:
    """An engine of paper; `look` is one look of its client's, so many seconds after the one before."""

    def __init__(self) -> None:
        fd = create_board(1)
        self.process, self.line = PaperProcess(), StatusLine(fd, 0)
        self._board = StatusBoard(fd, 1)
        self.watchdog = EngineWatchdog(self.process, self._board, TIMEOUT_S)
        self.watchdog.stop()  # its own thread makes no more checks
        self._now = 0.0
        os.close(fd)

    def look(
        self, num_looks: int = 1, after_s: float = PERIOD_S, *, beats: bool = True, iterations: bool = False
    ) -> None:
        for _ in range(num_looks):
            self._now += after_s
            if beats:
                self.line.beat()
            if iterations:
                self.line.turn()
            self.watchdog.check(self._board.read(0), self._now)

    @property
    def error(self):
        return self.watchdog.killed_for


@pytest.fixture
def watched():
    return Watched()


def test_one_that_beats_and_sleeps_lives(watched):
    watched.line.end()
    watched.look(100)
    assert watched.error is None


def test_one_that_is_silent_is_killed_once_and_named(watched):
    watched.line.end()
    watched.look()
    watched.look(7, beats=False)
    assert watched.error is None
    watched.look(2, beats=False)
    assert watched.process.signals == [signal.SIGKILL]
    assert "'engine' (pid 4711) hung: its heartbeat was silent for 8.0 s, it was sleeping" in watched.error.message
    assert "engine_timeout_s=8.0" in watched.error.message
    assert watched.error.details["last_log"] == ["said this"]


def test_a_client_that_was_away_itself_does_not_count_that(watched):
    """As one that was suspended with its engine, and goes on first."""
    watched.line.end()
    watched.look(3)
    watched.look(after_s=3600.0, beats=False)
    watched.look(3, beats=False)
    assert watched.error is None


def test_an_iteration_that_does_not_end(watched):
    watched.line.end()
    watched.line.turn()
    watched.look(9)
    assert "an iteration of its loop did not end for 8.0 s" in watched.error.message


def test_iterations_that_end_and_waits_within_them(watched):
    watched.line.end()
    watched.look(20, iterations=True)
    watched.line.end()
    watched.line.go_on()  # of a loop that sleeps, which is no iteration
    watched.look(20)
    for _ in range(20):
        watched.line.turn()
        watched.look(6)
        watched.line.go_on()
        watched.look(6)
    assert watched.error is None


def test_before_it_has_started_only_one_that_is_stopped_is_silent(watched):
    watched.look(100, beats=False)
    assert watched.error is None
    watched.process.state = "stopped"
    watched.look(9, beats=False)
    assert "it was stopped" in watched.error.message


def test_one_that_has_ended_is_not_said_to_hang(watched):
    watched.line.end()
    watched.process.signals.append(signal.SIGSEGV)
    watched.look(20, beats=False)
    assert watched.error is None


def test_a_value_that_changes_or_is_none_counts_from_anew():
    unchanged = UnchangedFor(max_gap_s=2.0)
    looks = [(1, 0.0), (1, 1.5), (1, 10.0), (2, 11.0), (2, 12.0), (None, 13.0), (None, 14.0), (2, 15.0), (2, 15.5)]
    assert [unchanged.look(value, now) for value, now in looks] == [0.0, 1.5, 3.5, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5]
