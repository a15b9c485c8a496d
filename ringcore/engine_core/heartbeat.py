"""Heartbeat and watchdog of the engine process: the client reads one line of a `StatusBoard` in shared memory.

    word           written by                           it does not change when
    -------------  -----------------------------------  ----------------------------------------------------------
    heartbeat      the engine's heartbeat thread        the process is stopped, or native code holds the GIL
    busy since     the engine's loop, every iteration   an iteration of the loop hangs; 0 while the loop polls
    calls          the loop, when it starts to poll     0 until the engine has started

Start-up and recovery are long and have deadlines of their own. Until the engine has started the watchdog counts silence
only for a process that the kernel reports as stopped, and it does not time an iteration that replaces workers, nor the
iterations of a loop that computes the steps itself.
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

__all__ = ["EngineWatchdog", "start_heartbeat"]

_PERIOD_S = 1.0
_CHECKS_PER_TIMEOUT = 8  # at least, for a short timeout
_JOIN_S = 2.0
_MAX_STACK_CHARS = 16 << 10
_log = logging.getLogger(__name__)


def start_heartbeat(line: StatusLine, timeout_s: float | None) -> None:
    """Starts the heartbeat: a daemon thread for the life of the process. timeout_s: the watchdog's timeout."""
    period_s = _period_s(timeout_s)

    def beat() -> None:
        while True:
            line.beat()
            time.sleep(period_s)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _period_s(timeout_s: float | None) -> float:
    return _PERIOD_S if timeout_s is None else min(_PERIOD_S, timeout_s / _CHECKS_PER_TIMEOUT)


class EngineWatchdog:
    """The client's watchdog thread for an engine process, from construction to `stop`. It kills a process that hangs
    for `timeout_s` seconds; only seconds in which the client itself was running count.

    killed_for: the error to raise for the death of a process that the watchdog killed. It holds no reference to the
    client.
    """

    def __init__(self, process: ChildProcess, board: StatusBoard, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s
        self.killed_for: EngineDeadError | None = None
        self._period_s = _period_s(timeout_s)
        self._heartbeat, self._iteration = UnchangedFor(2 * self._period_s), UnchangedFor(2 * self._period_s)
        self._stopping: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant: `stop` may run in a finalizer
        # Only the thread references the board: its descriptor closes with the thread, even if the client object lives.
        self._thread = threading.Thread(target=self._run, args=(board,), name="engine watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.put(None)
        if threading.current_thread() is not self._thread:  # a client may be finalized in this very thread
            self._thread.join(_JOIN_S)

    def _run(self, board: StatusBoard) -> None:
        while self.killed_for is None:
            try:
                self._stopping.get(timeout=self._period_s)
            except queue.Empty:
                self.check(board.read(0), time.monotonic())
            else:
                return

    def check(self, status: RankStatus, now: float) -> None:
        """One check; kills the process if it has hung too long. now: monotonic seconds."""
        is_counted = status.num_calls > 0 or self._process.process_state() == "stopped"
        silent_s = self._heartbeat.look(status.heartbeat_ns if is_counted else None, now)
        iteration_s = self._iteration.look(status.busy_since_ns, now)
        if silent_s >= self._timeout_s:
            self._kill(f"its heartbeat was silent for {silent_s:.1f} s", silent_s)
        elif iteration_s >= self._timeout_s:
            self._kill(f"an iteration of its loop did not end for {iteration_s:.1f} s", iteration_s)

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
