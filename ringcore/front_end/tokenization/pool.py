"""Chat templates and tokenization in killable processes, with bounded queues (back-pressure) and two lanes.

    submit ──▶ short lane: queue ──▶ process       jobs of up to 16 KiB
           ──▶ long lane:  queue ──▶ process       longer jobs; the process starts with the first one

The lanes prevent head-of-line blocking of short prompts by long ones; a short job that turns out slow is detached from
the short lane together with its process, for the same reason. A job that exceeds `tokenizer_timeout_s`, or whose
process dies twice, is refused; a new process executes the others. A cancelled job is dropped from its queue; if it is
being executed and takes long, its process is killed.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from concurrent.futures import Future

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import EngineDeadError, QueueFullError, RingcoreError, error_from_wire
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.job_process import reap
from ringcore.front_end.tokenization.lane import QueuedJob, TokenizerLane
from ringcore.front_end.tokenization.text_jobs import Failed, TextAnswer, TextJob
from ringcore.host.owner_process import OwnerProcess
from ringcore.tracing import Tracer

__all__ = ["MAX_QUEUE_BYTES", "TokenizerPool"]

MAX_QUEUE_BYTES = 64 << 20
_SHORT_BYTES = 16 << 10  # a few milliseconds of a tokenizer
_SHORT_DEPTH, _LONG_DEPTH = 16, 1  # jobs in flight in a process
_MAX_DETACHED = 2  # slow jobs detached from the short lane, each with its own process
_POLL_S = 0.25
_ACTIVE_S = 2.0  # idle time after which the thread polls without a timeout
_JOIN_S = 10.0

_log = logging.getLogger(__name__)


class TokenizerPool:
    """`submit` is thread-safe and non-blocking. One daemon thread drives the lanes, from `start` to `close`."""

    def __init__(self, config: EngineConfig, tracer: Tracer) -> None:
        self._max_jobs = config.model.max_tokenizer_queue
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[TextAnswer] = msgspec.msgpack.Decoder(TextAnswer)
        self._owner = OwnerProcess("the engine")
        self._lock = threading.RLock()
        self._killed: list[ChildProcess] = []
        self._short = TokenizerLane(config, self._killed, _SHORT_DEPTH, tracer)
        self._long = TokenizerLane(config, self._killed, _LONG_DEPTH, tracer)
        self._detached: list[TokenizerLane] = []
        self._num_bytes = 0
        self._num_jobs = 0
        self.num_refused = 0
        self._error: RingcoreError | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_parked = False
        self._active_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ringcore-tokenizer", daemon=True)

    def start(self) -> None:
        """Starts the thread, and the process of the short lane, without waiting for it."""
        self._short.start()
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs that are queued or in flight."""
        return self._num_jobs

    def submit(self, job: TextJob) -> Future[TextAnswer]:
        """The future raises `InvalidRequestError` if the job is refused. It may be cancelled at any time.

        Raises `QueueFullError` if the queue is full (back-pressure), and the error that ended the pool.
        """
        self._owner.check()
        entry = QueuedJob(job, self._encoder.encode(job))
        with self._lock:
            if self._error is not None:
                raise type(self._error)(self._error.message, **self._error.details)
            self._check_room(len(entry.body))
            self._num_jobs += 1
            self._num_bytes += len(entry.body)
            lane = self._short if len(entry.body) <= _SHORT_BYTES else self._long
            lane.queue.append(entry)
            lane.dispatch()
            if self._is_parked or lane.process is None or lane.process.has_backlog:
                self._wake()
        entry.future.add_done_callback(lambda future: self._on_done(entry, future))
        return entry.future

    def _check_room(self, num_bytes: int) -> None:
        has_room = self._num_jobs < self._max_jobs and self._num_bytes + num_bytes <= MAX_QUEUE_BYTES
        if has_room or not self._num_jobs:
            return
        self.num_refused += 1
        raise QueueFullError(
            f"{self._num_jobs} prompts of {self._num_bytes} bytes wait for the tokenizer, its queue is limited to "
            f"max_tokenizer_queue={self._max_jobs} of {MAX_QUEUE_BYTES} bytes; try again in a second",
            num_waiting=self._num_jobs,
            limit=self._max_jobs,
        )

    def _on_done(self, entry: QueuedJob, future: Future[TextAnswer]) -> None:
        with self._lock:
            self._num_jobs -= 1
            self._num_bytes -= len(entry.body)
            if not future.cancelled():
                return
            entry.is_abandoned = True
            for lane in self._lanes():
                if entry in lane.queue:
                    lane.queue.remove(entry)

    def _lanes(self) -> list[TokenizerLane]:
        return [self._short, self._long, *self._detached]

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # -----------------------------------------------------------------------------------------------------------
    # The thread.

    def _run(self) -> None:
        try:
            while self._error is None:
                self._iterate()
        except BaseException as error:
            _log.exception("the tokenizer pool's thread failed")
            self._error = RingcoreError(f"the tokenizer's thread failed: {error!r}")
        self._end()

    def _iterate(self) -> None:
        with self._lock:
            outcomes = [outcome for lane in self._lanes() for outcome in lane.advance()]
            self._detach_slow_jobs()
            reap(self._killed)
            is_idle = all(lane.is_idle for lane in self._lanes()) and not self._killed
            if not is_idle or outcomes:
                self._active_s = time.monotonic()
            self._is_parked = is_idle and time.monotonic() - self._active_s > _ACTIVE_S
            poll = self._poll()
            timeout_s = None if self._is_parked else _POLL_S
        for entry, outcome in outcomes:
            self._resolve(entry, outcome)
        if not outcomes:
            poll.poll(None if timeout_s is None else timeout_s * 1e3)
            self._drain_wake()

    def _detach_slow_jobs(self) -> None:
        for lane in [lane for lane in self._detached if lane.is_idle]:
            lane.drop_process()
            self._detached.remove(lane)
        if len(self._detached) < _MAX_DETACHED and (detached := self._short.detach_slow_job()) is not None:
            self._detached.append(detached)

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

    def _resolve(self, entry: QueuedJob, outcome: bytes | RingcoreError) -> None:
        if not entry.future.set_running_or_notify_cancel():
            return
        try:
            answer = self._decoder.decode(outcome) if isinstance(outcome, bytes) else outcome
        except msgspec.MsgspecError as error:
            answer = RingcoreError(f"the answer of the tokenizer's process cannot be decoded: {error}")
        if isinstance(answer, Failed):
            answer = error_from_wire(answer.error)
        if isinstance(answer, RingcoreError):
            entry.future.set_exception(answer)
        else:
            entry.future.set_result(answer)

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    def close(self, error: RingcoreError | None = None) -> None:
        """Ends the processes; pending futures and later calls raise the error, or `EngineDeadError`. Idempotent. Does
        nothing in a process that was forked from this one."""
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
            left: list[QueuedJob] = []
            for lane in self._lanes():
                lane.drop_process()
                left += lane.queue
                lane.queue.clear()
            while self._killed:
                self._killed.pop().terminate()  # returns soon: it was killed before
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)
            error = self._error
        assert error is not None
        for entry in left:
            self._resolve(entry, error)
