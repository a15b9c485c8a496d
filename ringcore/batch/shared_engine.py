"""Answers a job's lines by an engine that others use too, and that is kept alive by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ringcore.batch.figures import EngineFigures, RequestAbortedError
from ringcore.batch.lines import InputLine, LineError, LineForm, Outcome, Take
from ringcore.errors import EngineDeadError, QueueFullError, WorkerDiedError
from ringcore.openai_api.served_model import ServedModel

__all__ = ["SharedEngine"]

_QUEUE_FULL_S = 0.05
_MAX_ATTEMPTS = 3  # of a line whose engine died, or whose request was aborted
_IS_DEAD_S = 0.5
_EXPIRED = LineError("batch_expired", "not run: the completion window of the batch is over")


class SharedEngine:
    """width: the most lines in flight. on_start: called before the first line is taken. has_expired: whether lines that
    are not in flight yet have error records in place of answers. See `Answerer`."""

    def __init__(
        self,
        model: ServedModel,
        width: int,
        deliver: Callable[[Outcome], None],
        on_start: Callable[[], None],
        has_expired: Callable[[], bool],
    ) -> None:
        self._model, self.width, self._deliver = model, width, deliver
        self._on_start, self._has_expired = on_start, has_expired
        self.num_in_flight = self.num_restarts = 0

    async def start(self) -> None:
        self._on_start()

    async def close(self) -> None:
        """The engine is not this job's."""

    def figures(self) -> EngineFigures:
        stats = self._model.engine.stats
        hits, queries = stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens
        return EngineFigures(stats.num_running, stats.num_waiting, 0.0, hits, queries)

    async def run(self, take: Take, form: LineForm) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.width):
                    workers.create_task(self._work(take, form))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, take: Take, form: LineForm) -> None:
        while (line := await take()) is not None:
            self.num_in_flight += 1
            try:
                self._deliver(await self._answer(line, form))
            finally:
                self.num_in_flight -= 1

    async def _answer(self, line: InputLine, form: LineForm) -> Outcome:
        """Raises `EngineDeadError` once the engine is not replaced any more."""
        num_attempts = 0
        while not self._has_expired():
            try:
                return await form.answer(self._model, line)
            except QueueFullError:
                await asyncio.sleep(_QUEUE_FULL_S)
                continue
            except (RequestAbortedError, EngineDeadError) as error:
                if isinstance(error, WorkerDiedError):
                    return form.failed(line, error)
                # An engine that is being closed fails its requests too, and is not being replaced.
                num_attempts += isinstance(error, RequestAbortedError) or self._model.engine.is_starting
                if num_attempts == _MAX_ATTEMPTS:
                    return form.failed(line, error)
                await self._check_alive()
            except Exception as error:
                return form.failed(line, error)
        await asyncio.sleep(0)  # nothing else lets the other requests go on
        return form.failed(line, _EXPIRED)

    async def _check_alive(self) -> None:
        """Raises `EngineDeadError` if the engine has died and no restart is left, or was closed."""
        try:
            async with asyncio.timeout(_IS_DEAD_S):
                cause = await self._model.engine.wait_dead()
        except TimeoutError:
            return
        message = "the engine was closed" if cause is None else cause.message
        raise EngineDeadError(message, process="engine")
