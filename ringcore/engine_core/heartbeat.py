"""Whether an engine process still runs, seen by its client without asking: one line of a `StatusBoard` that both share.

    word           written by                      it stands still
    -------------  ------------------------------  ---------------------------------------------------------------
    heartbeat      a thread of the engine's own    where the process is stopped, or native code keeps Python's lock
    busy since     the engine's loop, every turn   where a turn of the loop does not end; 0 while the loop sleeps
    calls          the loop, when it goes to sleep 0 until the engine has started

A start and a recovery are long and have deadlines of their own: until the engine has started only a process that the
kernel calls stopped is silent, and a turn that replaces workers is not timed. Nor are the turns of a loop that computes
the steps itself.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time

from ringcore.errors import EngineDeadError
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.status_board import RankStatus, StatusBoard, StatusLine
from ringcore.executor.unchanged import UnchangedFor

__all__ = ["EngineWatch", "start_heartbeat"]

_PERIOD_S = 1.0
_LOOKS = 8  # within a short timeout
_JOIN_S = 2.0
_MAX_STACK_CHARS = 16 << 10
_log = logging.getLogger(__name__)


def start_heartbeat(line: StatusLine, timeout_s: float | None) -> None:
    """Beats from a daemon thread as long as this process lives. timeout_s: the client's."""
    period_s = _period_s(timeout_s)

    def beat() -> None:
        while True:
            line.beat()
            time.sleep(period_s)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _period_s(timeout_s: float | None) -> float:
    return _PERIOD_S if timeout_s is None else min(_PERIOD_S, timeout_s / _LOOKS)


class EngineWatch:
    """Looks at an engine process from its client with a daemon thread, from construction to `stop`; kills it where it
    has stood still for `timeout_s` seconds in which the client itself was running.

    killed_for: why it was killed, which is then the error that its death makes. Knows nothing of the client.
    """

    def __init__(self, process: ChildProcess, board: StatusBoard, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s
        self.killed_for: EngineDeadError | None = None
        self._period_s = _period_s(timeout_s)
        self._silence, self._turn = UnchangedFor(2 * self._period_s), UnchangedFor(2 * self._period_s)
        self._stopping: queue.SimpleQueue[None] = queue.SimpleQueue()  # put may be called from anywhere
        # The board, and with it a descriptor, is the thread's: closed clients may be kept.
        self._thread = threading.Thread(target=self._run, args=(board,), name="engine watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.put(None)
        if threading.current_thread() is not self._thread:  # which may have dropped the last reference to a client
            self._thread.join(_JOIN_S)

    def _run(self, board: StatusBoard) -> None:
        while self.killed_for is None:
            try:
                self._stopping.get(timeout=self._period_s)
            except queue.Empty:
                self.look(board.read(0), time.monotonic())
            else:
                return

    def look(self, status: RankStatus, now: float) -> None:
        """One look; kills the process where it is time to. now: monotonic seconds."""
        is_counted = status.num_calls > 0 or self._process.process_state() == "stopped"
        silent_s = self._silence.look(status.heartbeat_ns if is_counted else None, now)
        turn_s = self._turn.look(status.busy_since_ns, now)
        if silent_s >= self._timeout_s:
            self._kill(f"its heartbeat was silent for {silent_s:.1f} s", silent_s)
        elif turn_s >= self._timeout_s:
            self._kill(f"a turn of its loop did not end for {turn_s:.1f} s", turn_s)

    def _kill(self, why: str, hung_s: float) -> None:
        process, state = self._process, self._process.process_state()
        if not process.is_alive():
            return
        stacks = process.python_stacks()[:_MAX_STACK_CHARS]
        self.killed_for = EngineDeadError(
            f"the process {process.name!r} (pid {process.pid}) hung: {why}, it was {state}, and it was killed "
            f"(engine_timeout_s={self._timeout_s}; raise it if that may take longer, None means never)",
            process=process.name,
            pid=process.pid,
            process_state=state,
            exit_code=None,
            signal="SIGKILL",
            last_log=process.last_log(),
            hung_s=hung_s,
        )
        _log.error("%s\n%s", self.killed_for.message, stacks)
        process.signal(signal.SIGKILL)
