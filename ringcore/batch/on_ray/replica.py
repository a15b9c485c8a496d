"""The job's side of an engine that is an actor of Ray, and is replaced by another one wherever Ray finds room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ringcore.batch.figures import EngineFigures, Figures
from ringcore.batch.lines import LineForm, Outcome, Take
from ringcore.batch.on_ray.actor import Answer, EngineActor
from ringcore.batch.on_ray.shared_lines import Attempt, SharedLines
from ringcore.errors import CapacityError, EngineDeadError, RingcoreError

__all__ = ["ActorStarter", "RayReplica"]

_log = logging.getLogger(__name__)

_MAX_LOSSES = 3  # of actors that had a line in flight: then it has an error record
_CLOSE_S = 15.0


class ActorStarter:
    """Makes actors. ray: the module, connected. resources: of an actor. arguments: of `EngineActor`.

    timeout_s: how long Ray may take to find it a node.
    """

    def __init__(
        self,
        ray: Any,
        resources: Mapping[str, float],
        environment: Mapping[str, Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> None:
        self.ray, self._resources, self._timeout_s = ray, dict(resources), timeout_s
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        self._make = ray.remote(EngineActor).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=others,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy="SPREAD",
            runtime_env=dict(environment),
        )
        self._arguments = arguments

    async def start(self) -> Any:
        """An actor that is on a node. Raises `CapacityError` if Ray finds none in time."""
        actor = self._make.remote(*self._arguments)
        try:
            await asyncio.wait_for(_answer_of(actor.is_here.remote()), self._timeout_s)
        except TimeoutError:
            self.ray.kill(actor)
            available = self.ray.available_resources()
            free = {name: available.get(name, 0) for name in self._resources}
            raise CapacityError(
                f"Ray has found no node for an engine that needs {self._resources} in {self._timeout_s:g} s; free in "
                f"the whole cluster: {free}; lower data_parallel or ray_resources, add nodes, or raise ray_timeout_s",
                needed=self._resources,
                available=free,
            ) from None
        return actor


class RayReplica:
    """See `runner.Answerer`. lines: which all replicas of the job share. engine_restarts: as of `BatchOptions`, also
    of actors. release: called once it is closed."""

    def __init__(
        self,
        starter: ActorStarter,
        lines: SharedLines,
        engine_restarts: int,
        figures: Figures,
        deliver: Callable[[Outcome], None],
        release: Callable[[], None],
    ) -> None:
        self._starter, self._lines, self._engine_restarts = starter, lines, engine_restarts
        self._figures, self._deliver, self._release = figures, deliver, release
        self.width = 1
        self.num_in_flight = self.num_restarts = 0
        self._actor: Any = None
        self._engine = EngineFigures(0, 0, 0.0, 0, 0)
        self._num_engine_restarts = 0  # of the current actor's engine
        self._losses_in_a_row = 0  # since the last outcome
        self._loss: Exception | None = None  # of the current actor
        self._taking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `CapacityError` if Ray has no room for it, and the error of the engine's start."""
        self._actor = await self._starter.start()
        self.width = await _answer_of(self._actor.start.remote())

    def figures(self) -> EngineFigures:
        return self._engine

    async def close(self) -> None:
        if self._actor is not None and self._loss is None:
            with contextlib.suppress(Exception):  # it has died, or will now
                await asyncio.wait_for(_answer_of(self._actor.close.remote()), _CLOSE_S)
            self._starter.ray.kill(self._actor)
        self._actor = None
        await self._lines.close()
        self._release()

    async def run(self, take: Take, form: LineForm) -> None:
        """Answers lines until all replicas have answered all. Raises `RingcoreError` if it cannot go on."""
        self._lines.open(take)
        await self._serve(form)
        while True:
            await self._answer_all(form)
            if self._loss is None or not await self._is_replaced(form, self._loss):
                return

    async def _serve(self, form: LineForm) -> None:
        try:
            await _answer_of(self._actor.serve.remote(form))
        except _Lost as loss:
            self._on_loss(loss)

    # -----------------------------------------------------------------------------------------------------------
    # Lines.

    async def _answer_all(self, form: LineForm) -> None:
        """Returns when all are done, or the actor is lost."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.width):
                    workers.create_task(self._work(form))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, form: LineForm) -> None:
        while self._loss is None and (attempt := await self._taken()) is not None:
            if self._loss is not None:
                self._lines.give_back(attempt._replace(num_losses=attempt.num_losses - 1))
                return
            self.num_in_flight += 1
            try:
                self._take_answer(await _answer_of(self._actor.answer.remote(attempt.line)))
            except _Lost as loss:
                self._on_loss(loss)
                self._give_back(attempt, form, loss)
            finally:
                self.num_in_flight -= 1

    async def _taken(self) -> Attempt | None:
        """The next line. The actor's loss ends the wait for one."""
        task = asyncio.current_task()
        assert task is not None
        self._taking.add(task)
        try:
            return await self._lines.take()
        except asyncio.CancelledError:
            if self._loss is None:
                raise
            return None
        finally:
            self._taking.discard(task)

    def _take_answer(self, answer: Answer) -> None:
        self._losses_in_a_row = 0
        self.num_restarts += answer.num_restarts - self._num_engine_restarts
        self._num_engine_restarts, self._engine = answer.num_restarts, answer.engine
        for request in answer.finished:
            self._figures.add(request)
        self._deliver(answer.outcome)
        self._lines.done()

    def _give_back(self, attempt: Attempt, form: LineForm, loss: _Lost) -> None:
        if attempt.num_losses + 1 < _MAX_LOSSES:
            self._lines.give_back(attempt)
            return
        text = f"Ray lost each of the {_MAX_LOSSES} actors that had this request: {loss}"
        self._deliver(form.failed(attempt.line, EngineDeadError(text, process="engine")))
        self._lines.done()

    # -----------------------------------------------------------------------------------------------------------
    # Loss.

    def _on_loss(self, loss: _Lost) -> None:
        if self._loss is not None:
            return
        self._loss = loss
        self._starter.ray.kill(self._actor)  # where Ray cannot reach it, it may live
        for task in self._taking:
            task.cancel()

    async def _is_replaced(self, form: LineForm, cause: Exception) -> bool:
        """False if the other replicas have answered all lines meanwhile."""
        replacing = asyncio.ensure_future(self._replace(form, cause))
        over = asyncio.ensure_future(self._lines.over.wait())
        try:
            await asyncio.wait((replacing, over), return_when=asyncio.FIRST_COMPLETED)
            if not replacing.done():
                return False
            replacing.result()
            return True
        finally:
            for task in (replacing, over):
                task.cancel()
            await asyncio.gather(replacing, over, return_exceptions=True)

    async def _replace(self, form: LineForm, cause: Exception) -> None:
        """Without room in the cluster it waits for as long as the other replicas make progress."""
        while True:
            self._losses_in_a_row += 1
            if self._losses_in_a_row > self._engine_restarts:
                raise RingcoreError(
                    f"Ray lost an engine {self._losses_in_a_row} times in a row, and engine_restarts="
                    f"{self._engine_restarts}; the last time: {cause}; mend it, and run again with --resume: what is "
                    "done is kept"
                ) from cause
            _log.error("an engine on Ray is lost, its lines are run by others: %s", cause)
            num_done = self._lines.num_done
            try:
                await self.start()
            except CapacityError as error:
                if self._lines.num_done == num_done:
                    raise
                cause, self._losses_in_a_row = error, 0
            except (_Lost, EngineDeadError) as error:
                cause = error
            else:
                self.num_restarts += 1
                self._num_engine_restarts, self._loss = 0, None
                await self._serve(form)
                return


class _Lost(Exception):
    """The actor, or its node, has ended."""


async def _answer_of(reference: Awaitable[Any]) -> Any:
    """What an actor's method returns or, of ours, raises. Raises `_Lost`."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, RingcoreError) else error) from None
    except RayError as error:
        raise _Lost(str(error).partition("\n")[0]) from error
