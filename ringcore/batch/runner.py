"""Runs one job from its beginning, or from where it was left, to its end.

    input ─▶ LookAhead ─▶ Replica (engine 0) ─▶ InputOrder ─▶ Results ─▶ output and journal
             one queue    Replica (engine 1)    if asked      appended whole, synced by interval

Everything here runs in one event loop: a result is counted, written and recorded without a wait between, so that no
stop and no failure leaves half of it. Reading the input and syncing the disk are in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ringcore.batch.figures import EngineFigures, Figures
from ringcore.batch.input_order import InputOrder
from ringcore.batch.job_files import JobFiles
from ringcore.batch.lines import LineForm, Outcome, Take
from ringcore.batch.look_ahead import LookAhead
from ringcore.batch.openai_lines import OpenAiLines
from ringcore.batch.plain_lines import PlainLines
from ringcore.batch.results import Results
from ringcore.batch.scan import ScanStopped
from ringcore.batch.status import ProgressBar, Status
from ringcore.errors import RingcoreError

__all__ = ["Answerer", "BatchRun", "MakeAnswerers"]

_TICK_S = 0.5

MakeAnswerers = Callable[[Figures, Callable[[Outcome], None]], Sequence["Answerer"]]


class Answerer(Protocol):
    """What answers the lines of a job: an engine of its own (`Replica`), or one that others use too.

    width: the most lines in flight. num_in_flight: lines that were taken and not delivered.
    """

    width: int
    num_in_flight: int
    num_restarts: int

    async def start(self) -> None:
        """Waits until lines can be answered. Raises `RingcoreError`."""

    async def run(self, take: Take, form: LineForm) -> None:
        """Answers lines until `take` returns None. Raises `RingcoreError` if it cannot go on."""

    async def close(self) -> None: ...

    def figures(self) -> EngineFigures: ...


T = TypeVar("T")


class BatchRun:
    """One run of a job, once. `stop` may be called at any time, in the event loop's thread.

    make_answerers: called once, if there is something to answer. status, figures: how far it is, at any time.
    """

    def __init__(
        self,
        files: JobFiles,
        make_answerers: MakeAnswerers,
        *,
        status_path: str | None = None,
        shows_progress: bool = False,
    ) -> None:
        self._files, self._options, self._make_answerers = files, files.options, make_answerers
        self._shows_progress = shows_progress
        self.figures = Figures()
        self.status = Status(status_path, self.figures)
        self._answerers: Sequence[Answerer] = ()
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._results: Results | None = None
        self._order: InputOrder | None = None
        self._synced_s = 0.0

    def stop(self) -> None:
        """Takes no further line, and lets those in flight finish."""
        self._is_stopped = True
        self.status.state = "stopping"
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def run(self) -> None:
        """Returns when the job is complete or was stopped: see `status`. Raises `RingcoreError` if it cannot run; what
        was done is kept."""
        self._stopped = asyncio.get_running_loop().create_future()
        if self._is_stopped:
            self._stopped.set_result(None)
        try:
            await self._run()
            self.status.state = "stopped" if self._is_stopped and not self._is_complete else "complete"
        except BaseException as error:
            self.status.state = "failed"
            self.status.error = error.message if isinstance(error, RingcoreError) else repr(error)
            raise
        finally:
            with contextlib.suppress(RingcoreError):
                self.status.write()

    @property
    def _is_complete(self) -> bool:
        return self._results is not None and self.status.num_done == self.status.num_requests

    async def _run(self) -> None:
        self.status.write()
        try:
            results = self._results = self._files.recovered()
            if results is None or results.done.num_done < results.job.num_requests:
                self._answerers = self._make_answerers(self.figures, self._deliver)
            try:
                results = self._results = await asyncio.to_thread(self._files.checked, results, self._was_stopped)
            except ScanStopped:
                return
            self.status.done, self.status.num_requests = results.done, results.job.num_requests
            if self._answerers and await self._unless_stopped(self._wait_started()):
                await self._answer_all(results)
            if self._is_complete:
                await asyncio.to_thread(self._files.upload)
        finally:
            await asyncio.gather(*(answerer.close() for answerer in self._answerers), return_exceptions=True)
            if self._results is not None:
                self._results.close()

    def _was_stopped(self) -> bool:
        return self._is_stopped

    # -----------------------------------------------------------------------------------------------------------
    # Start.

    async def _wait_started(self) -> None:
        await asyncio.gather(*(answerer.start() for answerer in self._answerers))

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work came to its end; a stop cancels it."""
        assert self._stopped is not None
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    # -----------------------------------------------------------------------------------------------------------
    # Answers.

    async def _answer_all(self, results: Results) -> None:
        form = self._form(results)
        if self._options.order == "input":
            in_flight = sum(answerer.width for answerer in self._answerers)
            self._order = InputOrder(self._write, max(self._options.look_ahead, 2 * in_flight))
        assert self._stopped is not None
        lines = LookAhead(
            self._files.input,
            self._options,
            results.job.input,
            done=results.done,
            prefix=form.prefix,
            order=self._order,
            stopped=self._stopped,
        )
        self.figures.restart_clock()
        if not self._is_stopped:
            self.status.state = "running"
        bar = ProgressBar(self.status, self.figures, is_shown=self._shows_progress)
        try:
            await self._run_answerers(lines, form, bar)
        finally:
            await lines.close()
            with contextlib.suppress(RingcoreError):  # told already, if that is why it ends
                results.sync()
            self._sample()
            self.figures.stop_clock()
            bar.close()

    def _form(self, results: Results) -> LineForm:
        job = results.job
        if job.format == "openai":
            return OpenAiLines(job.hash, self._files.config.model.seed, self._files.url)
        return PlainLines(self._files.config.model.seed, self._files.defaults)

    async def _run_answerers(self, lines: LookAhead, form: LineForm, bar: ProgressBar) -> None:
        working = [asyncio.ensure_future(answerer.run(lines.take, form)) for answerer in self._answerers]
        ticking = asyncio.ensure_future(self._tick(bar))
        whole = asyncio.gather(*working)
        try:
            await asyncio.wait((whole, ticking), return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():
                ticking.result()
            whole.result()
        finally:
            for task in (*working, ticking):
                task.cancel()
            await asyncio.gather(*working, ticking, whole, return_exceptions=True)

    def _deliver(self, outcome: Outcome) -> None:
        if self._order is None:
            self._write(outcome)
        else:
            self._order.add(outcome)

    def _write(self, outcome: Outcome) -> None:
        assert self._results is not None
        self._results.add(outcome)
        if not self._options.sync_interval_s:
            self._results.sync()

    # -----------------------------------------------------------------------------------------------------------
    # The clock.

    async def _tick(self, bar: ProgressBar) -> None:
        loop = asyncio.get_running_loop()
        self._synced_s = loop.time()
        while True:
            await asyncio.sleep(min(_TICK_S, self._options.sync_interval_s or _TICK_S))
            self._sample()
            bar.show()
            self.status.write()
            if loop.time() - self._synced_s >= self._options.sync_interval_s:
                await self._sync()
                self._synced_s = loop.time()

    async def _sync(self) -> None:
        assert self._results is not None
        self._results.flush()
        end = self._results.unsynced_end
        if end is not None:
            await asyncio.to_thread(self._results.sync_data)
            self._results.mark_synced(end)

    def _sample(self) -> None:
        self.status.num_in_flight = sum(answerer.num_in_flight for answerer in self._answerers)
        self.status.num_restarts = sum(answerer.num_restarts for answerer in self._answerers)
        engines = [answerer.figures() for answerer in self._answerers]
        usage = sum(one.kv_cache_usage for one in engines) / max(1, len(engines))
        self.figures.sample(
            EngineFigures(
                sum(one.num_running for one in engines),
                sum(one.num_waiting for one in engines),
                usage,
                sum(one.num_hit_tokens for one in engines),
                sum(one.num_queried_tokens for one in engines),
            )
        )
