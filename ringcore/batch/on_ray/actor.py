"""One engine of a job, as an actor of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringcore.batch.figures import EngineFigures, Figures, Finished
from ringcore.batch.lines import InputLine, LineForm, Outcome
from ringcore.batch.options import BatchOptions
from ringcore.batch.replica import Replica
from ringcore.errors import EngineDeadError

__all__ = ["Answer", "EngineActor"]


class Answer(NamedTuple):
    """finished: requests since the last answer. engine, num_restarts: of the actor's engine."""

    outcome: Outcome
    finished: list[Finished]
    engine: EngineFigures
    num_restarts: int


class _Collected(Figures):
    """Keeps requests for the job's own figures."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[Finished] = []

    def add(self, request: Finished) -> None:
        self.finished.append(request)


class EngineActor:
    """Answers lines as a `Replica` of the job's own process does, which it has: an engine that dies here is replaced
    here."""

    def __init__(self, engine_options: Mapping[str, Any], options: BatchOptions) -> None:
        self._figures = _Collected()
        self._replica = Replica(engine_options, options, self._figures, self._deliver)
        self._lines: asyncio.Queue[InputLine] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Outcome]] = {}
        self._running: asyncio.Task[None] | None = None

    async def is_here(self) -> bool:
        """Ray has found it a node."""
        return True

    async def start(self) -> int:
        """The most lines that it wants at once. Raises the error of the engine's start."""
        await self._replica.start()
        return self._replica.width

    async def serve(self, form: LineForm) -> None:
        """Lines of this form are answered from now on."""
        self._running = asyncio.ensure_future(self._run(form))

    async def _run(self, form: LineForm) -> None:
        try:
            await self._replica.run(self._lines.get, form)
        except Exception as error:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(error)
            raise

    async def answer(self, line: InputLine) -> Answer:
        """Raises `RingcoreError` once the engine cannot be kept alive."""
        assert self._running is not None, "serve comes first"
        if self._running.done():
            self._running.result()
            raise EngineDeadError("the engine was closed", process="engine")
        asked = self._asked[line.number] = asyncio.get_running_loop().create_future()
        self._lines.put_nowait(line)
        try:
            outcome = await asked
        finally:
            del self._asked[line.number]
        finished, self._figures.finished = self._figures.finished, []
        return Answer(outcome, finished, self._replica.figures(), self._replica.num_restarts)

    def _deliver(self, outcome: Outcome) -> None:
        self._asked[outcome.record.line].set_result(outcome)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._replica.close()
