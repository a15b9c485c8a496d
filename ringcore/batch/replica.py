"""One engine of a job: it takes lines from the common queue, and outlives its engine process.

    phase      takes lines of              ends when
    queue      the job's queue             the queue is over, or the engine died
    suspects   a group of its suspects     all are answered, or the engine died

When the engine dies, the lines in flight are suspects: one of them may have killed it. A new engine runs them again in
groups that are an eighth of the size each time one of them dies again, and then each alone. So innocent lines are
answered, nearly all of them at once, and a line that kills an engine in which it is alone has an error record.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ringcore.batch.figures import EngineFigures, Figures, RequestAbortedError
from ringcore.batch.lines import InputLine, LineError, LineForm, Outcome, Take
from ringcore.batch.options import BatchOptions
from ringcore.errors import EngineDeadError, QueueFullError, RingcoreError, WorkerDiedError
from ringcore.front_end.async_engine import AsyncEngine
from ringcore.host.file_names import as_utf8
from ringcore.openai_api.errors import ApiError
from ringcore.openai_api.served_model import ServedModel
from ringcore.params.sampling_params import MAX_N

__all__ = ["Replica"]

_log = logging.getLogger(__name__)

_GROUP_FACTOR = 8
_LEAST_DEATHS = 2  # before the one that makes an error record: the first may have been anyone's fault
_RETRY_S = 1.0  # after a failed start, times the failures in a row: memory of the last one may be in use yet
_QUEUE_FULL_S = 0.02
_MAX_ABORTS = 3  # an operator who puts the engine to sleep aborts requests, which is no fault of theirs


class _Attempt(NamedTuple):
    line: InputLine
    num_deaths: int  # of engines that had it in flight


_TakeAttempt = Callable[[], Awaitable[_Attempt | None]]


class Replica:
    """engine_options: of its `AsyncEngine`. deliver: called with each outcome.

    num_in_flight: lines that were taken and not delivered; suspects that wait count. width: the most lines in flight.
    """

    def __init__(
        self,
        engine_options: Mapping[str, Any],
        options: BatchOptions,
        figures: Figures,
        deliver: Callable[[Outcome], None],
    ) -> None:
        self._engine_options, self._options = dict(engine_options), options
        self._figures, self._deliver = figures, deliver
        self.engine = AsyncEngine(**self._engine_options)
        self.num_restarts = self.num_in_flight = 0
        self._deaths_in_a_row = 0  # since the last outcome
        self._suspects: deque[_Attempt] = deque()
        self._death: EngineDeadError | None = None  # of the current engine
        self._taking: set[asyncio.Task[None]] = set()  # workers that wait for a line
        self.width = options.max_in_flight or 2 * self.engine.config.scheduler.max_num_seqs

    async def start(self) -> None:
        """Waits until the engine is ready. Raises the error of its start."""
        await self.engine.start()
        self._model = ServedModel(
            self.engine,
            names=self._options.served_model_names or (as_utf8(self.engine.config.model.model),),
            max_n=MAX_N,
            tool_call_parser=self._options.tool_call_parser,
            reasoning_parser=self._options.reasoning_parser,
            observe=self._figures.record,
        )

    async def close(self) -> None:
        await self.engine.close()

    def figures(self) -> EngineFigures:
        """As the engine last reported them; its counters are of its current process."""
        stats, used = self.engine.stats, 0.0
        if not self.engine.is_starting:
            with suppress(RingcoreError):
                used = 1 - stats.num_free_blocks / self.engine.ready.num_blocks
        return EngineFigures(
            stats.num_running, stats.num_waiting, used, stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens
        )

    async def run(self, take: Take, form: LineForm) -> None:
        """Answers lines until `take` returns None. Raises `RingcoreError` when the engine cannot be kept alive."""

        self._form = form

        async def fresh() -> _Attempt | None:
            line = await take()
            if line is None:
                return None
            self.num_in_flight += 1
            return _Attempt(line, 0)

        is_over = False
        while not is_over or self._suspects:
            if self._suspects:
                await self._run_group()
            else:
                await self._run_phase(fresh, self.width)
                is_over = self._death is None
            if self._death is not None:
                await self._restart(self._death)

    # -----------------------------------------------------------------------------------------------------------
    # Phases.

    async def _run_group(self) -> None:
        """Suspects of as many deaths each: the more deaths, the fewer together."""
        num_deaths = self._suspects[0].num_deaths
        size = max(1, self.width // _GROUP_FACTOR**num_deaths)
        group: deque[_Attempt] = deque()
        while self._suspects and len(group) < size and self._suspects[0].num_deaths == num_deaths:
            group.append(self._suspects.popleft())

        async def take() -> _Attempt | None:
            return group.popleft() if group else None

        await self._run_phase(take, len(group))
        self._suspects.extendleft(reversed(group))  # those that the engine died before

    async def _run_phase(self, take: _TakeAttempt, width: int) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(width):
                    workers.create_task(self._work(take, is_alone=width == 1))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, take: _TakeAttempt, *, is_alone: bool) -> None:
        while self._death is None and (attempt := await self._taken(take)) is not None:
            outcome = await self._answer(attempt, is_alone=is_alone)
            if outcome is not None:
                self.num_in_flight -= 1
                self._deaths_in_a_row = 0
                self._deliver(outcome)

    async def _taken(self, take: _TakeAttempt) -> _Attempt | None:
        """The next line. The engine's death ends the wait for one, since it may be a wait for the suspects."""
        task = asyncio.current_task()
        assert task is not None
        self._taking.add(task)
        try:
            return await take()
        except asyncio.CancelledError:
            if self._death is None:
                raise
            return None
        finally:
            self._taking.discard(task)

    # -----------------------------------------------------------------------------------------------------------
    # One line.

    async def _answer(self, attempt: _Attempt, *, is_alone: bool) -> Outcome | None:
        """None if it became a suspect."""
        num_aborts = 0
        while True:
            try:
                return await self._form.answer(self._model, attempt.line)
            except QueueFullError:
                await asyncio.sleep(_QUEUE_FULL_S)
            except RequestAbortedError as error:
                num_aborts += 1
                if num_aborts == _MAX_ABORTS:
                    return self._form.failed(attempt.line, error)
            except EngineDeadError as error:
                if isinstance(error, WorkerDiedError):  # the engine lives, and has found this request to be the cause
                    return self._form.failed(attempt.line, error)
                self._on_death(error)
                if is_alone and attempt.num_deaths >= _LEAST_DEATHS:
                    return self._form.failed(attempt.line, _poisonous(error, attempt.num_deaths + 1))
                self._suspects.append(attempt._replace(num_deaths=attempt.num_deaths + 1))
                return None
            except Exception as error:
                if not isinstance(error, RingcoreError | ApiError | LineError):
                    _log.exception("line %d: its request failed", attempt.line.number)  # our bug costs one line alone
                return self._form.failed(attempt.line, error)

    def _on_death(self, error: EngineDeadError) -> None:
        if self._death is not None:
            return
        self._death = error
        for task in self._taking:
            task.cancel()

    # -----------------------------------------------------------------------------------------------------------
    # Restart.

    async def _restart(self, cause: RingcoreError) -> None:
        await self.engine.close()
        while True:
            self._deaths_in_a_row += 1
            limit = self._options.engine_restarts
            if self._deaths_in_a_row > limit:
                raise RingcoreError(
                    f"the engine died {self._deaths_in_a_row} times in a row, and engine_restarts={limit}; the last "
                    f"time: {cause.message}; mend it, and run again with --resume: what is done is kept"
                ) from cause
            self.num_restarts += 1
            _log.error(
                "the engine died, %d lines are run again by a new one: %s", len(self._suspects), _first_line(cause)
            )
            try:
                self.engine = AsyncEngine(**self._engine_options)
                await self.start()
            except RingcoreError as error:
                cause = error
                await self.engine.close()
                await asyncio.sleep(_RETRY_S * self._deaths_in_a_row)
            else:
                self._death = None
                return


def _poisonous(cause: EngineDeadError, num_deaths: int) -> EngineDeadError:
    text = f"the engine died each of the {num_deaths} times that it had this request, the last time with it alone"
    return EngineDeadError(f"{text}: {_first_line(cause)}", **cause.details)


def _first_line(error: RingcoreError) -> str:
    return error.message.partition("\n")[0]
