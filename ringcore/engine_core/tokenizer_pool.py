"""Chat templates and tokenization, in processes that can be stopped, with bounded queues before them.

    submit ──▶ short lane: queue ──▶ process       what is quick for any model that means well
           ──▶ long lane:  queue ──▶ process       all else, started for the first of it

A job that takes longer than `tokenizer_timeout_s`, or ends its process twice, is refused; its neighbours are executed
by a new process. A short job that takes long leaves the short lane together with its process, so that the next ones do
not wait for it. A job whose caller has gone is dropped; one that is being executed is ended if it takes long.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.text_jobs import EncodeChat, Failed, RenderChat, TextAnswer, TextJob
from ringcore.engine_core.tokenizer_process import CHANNEL, ENTRY, MAX_MEMORY_BYTES
from ringcore.errors import EngineDeadError, InvalidRequestError, QueueFullError, RingcoreError, error_from_wire
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.job_process import JobProcess, reap
from ringcore.owner_process import OwnerProcess
from ringcore.protocol.codec import encode_start

__all__ = ["MAX_QUEUE_BYTES", "TokenizerPool"]

MAX_QUEUE_BYTES = 64 << 20
_SHORT_BYTES = 16 << 10  # a few milliseconds of a tokenizer
_SHORT_DEPTH, _LONG_DEPTH = 16, 1  # jobs sent to a process and not answered
_LEAVES_LANE_S = 0.5  # a short job that takes longer
_MAX_LEAVING = 2
_ABANDONED_S = 0.5  # a job without a caller that takes longer costs its process
_START_S = 120.0  # imports on a machine that is busy with other work
_TICK_S = 0.25
_AWAKE_S = 2.0  # without work, until the thread sleeps without a tick
_JOIN_S = 10.0
# Threads of the tokenizers' own would reserve more address space than a process may have; a panic is one line of log.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}

_log = logging.getLogger(__name__)


class _Entry:
    """A job. started_s: when the process had answered all before it."""

    __slots__ = ("body", "field", "future", "is_abandoned", "num_deaths", "started_s")

    def __init__(self, job: TextJob, body: bytes) -> None:
        self.body = body
        self.field = "messages" if isinstance(job, EncodeChat | RenderChat) else "prompt"
        self.future: Future[TextAnswer] = Future()
        self.num_deaths = 0
        self.started_s = 0.0
        self.is_abandoned = False


_Outcome = tuple[_Entry, bytes | RingcoreError]


class _Lane:
    """Jobs in order, and the process that executes them.

    `advance` goes on without waiting and yields what has come of jobs. Invariant: `in_flight` are the jobs that the
    process has been sent and has not answered, in order; without a process there are none.
    """

    def __init__(self, config: EngineConfig, killed: list[ChildProcess], depth: int) -> None:
        self._config, self._killed, self._depth = config, killed, depth
        self._timeout_s = config.model.tokenizer_timeout_s
        self.queue: deque[_Entry] = deque()
        self.in_flight: deque[_Entry] = deque()
        self.process: JobProcess | None = None
        self._started_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.in_flight

    def start(self) -> None:
        payload = encode_start(self._config)
        self.process = JobProcess("tokenizer", ENTRY, payload, CHANNEL, _ENVIRONMENT)
        self._started_s = time.monotonic()

    def dispatch(self) -> None:
        """Sends the process what it may have."""
        if self.process is None or not self.process.is_ready:
            return
        while self.queue and len(self.in_flight) < self._depth:
            entry = self.queue.popleft()
            entry.started_s = time.monotonic()
            self.in_flight.append(entry)
            self.process.send(entry.body)

    def advance(self) -> Iterator[_Outcome]:
        if self.process is None and self.queue:
            try:
                self.start()
            except RingcoreError as error:
                yield from self._fail_all(error)
        if self.process is None:
            return
        try:
            is_ready = self.process.poll_ready()
        except RingcoreError as error:
            yield from self._fail_all(error)
            return
        if is_ready:
            self.process.write()
            while self.in_flight and (answer := self.process.poll_answer()) is not None:
                yield self.in_flight.popleft(), answer
                if self.in_flight:
                    self.in_flight[0].started_s = time.monotonic()
        yield from self._check_process(self.process)
        self.dispatch()

    def _check_process(self, process: JobProcess) -> Iterator[_Outcome]:
        """Ends the process where it is to be ended, and tells what that means for its first job."""
        now = time.monotonic()
        if not process.child.is_alive():
            how = process.child.describe_end()
            if not process.is_ready:
                yield from self._fail_all(_not_started(how))
                return
            yield from self._died(how)
        elif not process.is_ready:
            if now - self._started_s > _START_S:
                yield from self._fail_all(_not_started(f"it took longer than {_START_S:g} s"))
        elif self.in_flight:
            entry = self.in_flight[0]
            age_s = now - entry.started_s
            if age_s > self._timeout_s:
                self.in_flight.popleft()
                self.drop_process()
                yield (
                    entry,
                    self._refused(
                        entry,
                        f"the model's chat template or tokenizer took longer than {self._timeout_s:g} s for it; "
                        "send less, or raise tokenizer_timeout_s",
                    ),
                )
            elif entry.is_abandoned and age_s > _ABANDONED_S:
                self.drop_process()

    def _died(self, how: str) -> Iterator[_Outcome]:
        first = self.in_flight[0] if self.in_flight else None
        if first is not None:
            first.num_deaths += 1
        if first is None or first.num_deaths == 1:  # the job may have nothing to do with it
            self.drop_process()
        else:
            self.in_flight.popleft()
            self.drop_process()
            yield (
                first,
                self._refused(
                    first,
                    f"the tokenizer's process ended at it twice ({how}): needs more than {MAX_MEMORY_BYTES >> 20} MiB "
                    "of memory, or crashes the model's tokenizer; send less",
                ),
            )

    def _refused(self, entry: _Entry, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{entry.field}: {why}", field=entry.field, value=None)

    def _fail_all(self, error: RingcoreError) -> Iterator[_Outcome]:
        self.drop_process()
        while self.queue:
            yield self.queue.popleft(), error

    def drop_process(self) -> None:
        """Kills the process. What it had not answered is first in the queue again, but for what has no caller."""
        if self.process is not None:
            self._killed.append(self.process.kill())
            self.process = None
        self.queue.extendleft(entry for entry in reversed(self.in_flight) if not entry.is_abandoned)
        self.in_flight.clear()

    def split_first(self) -> _Lane | None:
        """A lane of its own for a job that holds the others up, with the process; None where none does."""
        if len(self.in_flight) + len(self.queue) < 2 or not self.in_flight:
            return None
        if time.monotonic() - self.in_flight[0].started_s < _LEAVES_LANE_S:
            return None
        leaving = _Lane(self._config, self._killed, depth=1)
        leaving.process, leaving._started_s = self.process, self._started_s
        leaving.in_flight.append(self.in_flight.popleft())
        self.process = None
        self.drop_process()
        return leaving


class TokenizerPool:
    """`submit` is thread-safe and never waits. One daemon thread does what takes time, from `start` to `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_jobs = config.model.max_tokenizer_queue
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[TextAnswer] = msgspec.msgpack.Decoder(TextAnswer)
        self._owner = OwnerProcess("the engine")
        self._lock = threading.RLock()
        self._killed: list[ChildProcess] = []
        self._short = _Lane(config, self._killed, _SHORT_DEPTH)
        self._long = _Lane(config, self._killed, _LONG_DEPTH)
        self._leaving: list[_Lane] = []
        self._num_bytes = 0
        self._num_jobs = 0
        self.num_refused = 0
        self._error: RingcoreError | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_dozing = False
        self._active_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ringcore-tokenizer", daemon=True)

    def start(self) -> None:
        """Starts the thread, and the process of the short lane, without waiting for it."""
        self._short.start()
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or are executed."""
        return self._num_jobs

    def submit(self, job: TextJob) -> Future[TextAnswer]:
        """The future raises `InvalidRequestError` where the job is refused. It may be cancelled at any time.

        Raises `QueueFullError` where too much waits, and what ended the pool.
        """
        self._owner.check()
        entry = _Entry(job, self._encoder.encode(job))
        with self._lock:
            if self._error is not None:
                raise type(self._error)(self._error.message, **self._error.details)
            self._check_room(len(entry.body))
            self._num_jobs += 1
            self._num_bytes += len(entry.body)
            lane = self._short if len(entry.body) <= _SHORT_BYTES else self._long
            lane.queue.append(entry)
            lane.dispatch()
            if self._is_dozing or lane.process is None or lane.process.has_backlog:
                self._wake()
        entry.future.add_done_callback(lambda future: self._on_done(entry, future))
        return entry.future

    def _check_room(self, num_bytes: int) -> None:
        has_room = self._num_jobs < self._max_jobs and self._num_bytes + num_bytes <= MAX_QUEUE_BYTES
        if has_room or not self._num_jobs:
            return
        self.num_refused += 1
        raise QueueFullError(
            f"{self._num_jobs} prompts of {self._num_bytes} bytes wait for the tokenizer, which takes "
            f"max_tokenizer_queue={self._max_jobs} of {MAX_QUEUE_BYTES} bytes; try again in a second",
            num_waiting=self._num_jobs,
            limit=self._max_jobs,
        )

    def _on_done(self, entry: _Entry, future: Future[TextAnswer]) -> None:
        with self._lock:
            self._num_jobs -= 1
            self._num_bytes -= len(entry.body)
            if not future.cancelled():
                return
            entry.is_abandoned = True
            for lane in self._lanes():
                if entry in lane.queue:
                    lane.queue.remove(entry)

    def _lanes(self) -> list[_Lane]:
        return [self._short, self._long, *self._leaving]

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # -----------------------------------------------------------------------------------------------------------
    # The thread.

    def _run(self) -> None:
        try:
            while self._error is None:
                self._turn()
        except BaseException as error:
            _log.exception("the thread that feeds the tokenizer cannot go on")
            self._error = RingcoreError(f"the tokenizer's thread failed: {error!r}")
        self._end()

    def _turn(self) -> None:
        with self._lock:
            outcomes = [outcome for lane in self._lanes() for outcome in lane.advance()]
            self._let_slow_jobs_leave()
            reap(self._killed)
            is_idle = all(lane.is_idle for lane in self._lanes()) and not self._killed
            if not is_idle or outcomes:
                self._active_s = time.monotonic()
            self._is_dozing = is_idle and time.monotonic() - self._active_s > _AWAKE_S
            poll = self._poll()
            timeout_s = None if self._is_dozing else _TICK_S
        for entry, outcome in outcomes:
            self._settle(entry, outcome)
        if not outcomes:
            poll.poll(None if timeout_s is None else timeout_s * 1e3)
            self._drain_wake()

    def _let_slow_jobs_leave(self) -> None:
        for lane in [lane for lane in self._leaving if lane.is_idle]:
            lane.drop_process()
            self._leaving.remove(lane)
        if len(self._leaving) < _MAX_LEAVING and (leaving := self._short.split_first()) is not None:
            self._leaving.append(leaving)

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for lane in self._lanes():
            if (process := lane.process) is not None:
                poll.register(process.channel, select.POLLIN | (select.POLLOUT if process.has_backlog else 0))
                poll.register(process.child.pidfd, select.POLLIN)
        return poll

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _settle(self, entry: _Entry, outcome: bytes | RingcoreError) -> None:
        if not entry.future.set_running_or_notify_cancel():
            return
        try:
            answer = self._decoder.decode(outcome) if isinstance(outcome, bytes) else outcome
        except msgspec.MsgspecError as error:
            answer = RingcoreError(f"what the tokenizer's process answers cannot be read: {error}")
        if isinstance(answer, Failed):
            answer = error_from_wire(answer.error)
        if isinstance(answer, RingcoreError):
            entry.future.set_exception(answer)
        else:
            entry.future.set_result(answer)

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def close(self, error: RingcoreError | None = None) -> None:
        """Ends the processes; futures that wait, and later calls, raise the error, or `EngineDeadError`. Idempotent.
        Does nothing in a process that was forked from this one."""
        if not self._owner.is_here:
            return
        with self._lock:
            self._error = self._error or error or EngineDeadError("the engine was closed", process="engine")
            if not self._thread.is_alive():
                self._end()
            self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _end(self) -> None:
        with self._lock:
            left: list[_Entry] = []
            for lane in self._lanes():
                lane.drop_process()
                left += lane.queue
                lane.queue.clear()
            while self._killed:
                self._killed.pop().terminate()  # it was killed: the kernel is at it
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)
            error = self._error
        assert error is not None
        for entry in left:
            self._settle(entry, error)


def _not_started(how: str) -> RingcoreError:
    return RingcoreError(f"the tokenizer's process did not start: {how}")
