"""One lane of the tokenizer pool: a FIFO queue of jobs, and the process that executes them in order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import psutil

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, RingcoreError
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.job_process import JobProcess
from ringcore.front_end.tokenization.process import CHANNEL, ENTRY, MAX_MEMORY_BYTES
from ringcore.front_end.tokenization.text_jobs import EncodeChat, RenderChat, TextAnswer, TextJob
from ringcore.protocol.codec import encode_start
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import TOKENIZE

__all__ = ["Outcome", "QueuedJob", "TokenizerLane"]

# A slow job is detached if others queue behind it (head-of-line blocking), and costs its process if it was cancelled.
# It is slow after _SLOW_S, in which the process has had _SLOW_CPU_S: one that is starved of CPU time is not to blame,
# and a new process, whose imports need more of it, would make its neighbours wait longer.
_SLOW_S, _SLOW_CPU_S = 0.5, 0.2
_START_S = 120.0  # the imports, on a loaded machine
# The tokenizers library's threads would exceed the limit of address space; without a backtrace a panic logs one line.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}

_log = logging.getLogger(__name__)


class QueuedJob:
    """A job. started_s: when the process had answered all earlier ones. cpu_s: of the process, when the job began to be
    slow. num_deaths: processes that died at it."""

    __slots__ = ("body", "cpu_s", "field", "future", "is_abandoned", "num_deaths", "started_s")

    def __init__(self, job: TextJob, body: bytes) -> None:
        self.body = body
        self.field = "messages" if isinstance(job, EncodeChat | RenderChat) else "prompt"
        self.future: Future[TextAnswer] = Future()
        self.num_deaths = 0
        self.started_s = 0.0
        self.cpu_s: float | None = None
        self.is_abandoned = False


Outcome = tuple[QueuedJob, bytes | RingcoreError]


class TokenizerLane:
    """Jobs in order, and the process that executes them.

    `advance` is non-blocking, and yields the outcome of each job that ended. Invariant: `in_flight` are the jobs that
    were sent to the process and are not answered, in order; without a process there are none.
    """

    def __init__(self, config: EngineConfig, killed: list[ChildProcess], depth: int, tracer: Tracer) -> None:
        self._config, self._killed, self._depth, self._tracer = config, killed, depth, tracer
        self._timeout_s = config.model.tokenizer_timeout_s
        self.queue: deque[QueuedJob] = deque()
        self.in_flight: deque[QueuedJob] = deque()
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
        """Sends queued jobs, up to `depth` in flight."""
        if self.process is None or not self.process.is_ready:
            return
        while self.queue and len(self.in_flight) < self._depth:
            entry = self.queue.popleft()
            entry.started_s = time.monotonic()
            self.in_flight.append(entry)
            self.process.send(entry.body)

    def advance(self) -> Iterator[Outcome]:
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
                entry = self.in_flight.popleft()
                if self._tracer.is_on:
                    self._trace(entry, self.process)
                yield entry, answer
                if self.in_flight:
                    self.in_flight[0].started_s = time.monotonic()
        yield from self._check_process(self.process)
        self.dispatch()

    def _trace(self, entry: QueuedJob, process: JobProcess) -> None:
        """The job as a span of its process, which executes one after the other; with the way there and back."""
        began_ns = round(entry.started_s * 1e9)
        track = f"tokenizer {process.child.pid}"
        self._tracer.note(TOKENIZE, began_ns, now_ns(), len(entry.body), track=track)

    def _check_process(self, process: JobProcess) -> Iterator[Outcome]:
        """Handles a process that died, failed to start or exceeded its deadline; yields the outcomes of its jobs."""
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
                    self._rejected(
                        entry,
                        f"the model's chat template or tokenizer took longer than {self._timeout_s:g} s for it; "
                        "send less, or raise tokenizer_timeout_s",
                    ),
                )
            elif self._is_slow(process, entry) and entry.is_abandoned:
                self.drop_process()

    def _is_slow(self, process: JobProcess, entry: QueuedJob) -> bool:
        """Of the first job in flight."""
        age_s = time.monotonic() - entry.started_s
        if age_s < _SLOW_S / 2:
            return False
        cpu_s = _cpu_s(process.child.pid)
        if entry.cpu_s is None:
            entry.cpu_s = cpu_s
        return age_s > _SLOW_S and cpu_s - entry.cpu_s > _SLOW_CPU_S

    def _died(self, how: str) -> Iterator[Outcome]:
        _log.warning("the tokenizer's process died: %s; the next prompt starts another one", how)
        first = self.in_flight[0] if self.in_flight else None
        if first is not None:
            first.num_deaths += 1
        if first is None or first.num_deaths == 1:  # the job may not be the cause: retry it once
            self.drop_process()
        else:
            self.in_flight.popleft()
            self.drop_process()
            yield (
                first,
                self._rejected(
                    first,
                    f"the tokenizer's process died at it twice ({how}): needs more than {MAX_MEMORY_BYTES >> 20} MiB "
                    "of memory, or crashes the model's tokenizer; send less",
                ),
            )

    def _rejected(self, entry: QueuedJob, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{entry.field}: {why}", field=entry.field, value=None)

    def _fail_all(self, error: RingcoreError) -> Iterator[Outcome]:
        self.drop_process()
        while self.queue:
            yield self.queue.popleft(), error

    def drop_process(self) -> None:
        """Kills the process. Its unanswered jobs return to the head of the queue, except cancelled ones."""
        if self.process is not None:
            self._killed.append(self.process.kill())
            self.process = None
        self.queue.extendleft(entry for entry in reversed(self.in_flight) if not entry.is_abandoned)
        self.in_flight.clear()

    def detach_slow_job(self) -> TokenizerLane | None:
        """Relieves head-of-line blocking: moves a slow first job, with the process, into a lane of its own. None if no
        job is slow."""
        if len(self.in_flight) + len(self.queue) < 2 or not self.in_flight:
            return None
        if self.process is None or not self._is_slow(self.process, self.in_flight[0]):
            return None
        detached = TokenizerLane(self._config, self._killed, 1, self._tracer)
        detached.process, detached._started_s = self.process, self._started_s
        detached.in_flight.append(self.in_flight.popleft())
        self.process = None
        self.drop_process()
        return detached


def _not_started(how: str) -> RingcoreError:
    return RingcoreError(f"the tokenizer's process did not start: {how}")


def _cpu_s(pid: int) -> float:
    """CPU seconds that the process has had; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
