"""An engine's requests, as changes of its memory stop them and let them go on."""

from __future__ import annotations

from collections.abc import Sized

from ringcore.engine_core.grammar_gate import GrammarGate
from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.protocol.requests import EngineCoreOutput
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["RequestGate"]


class RequestGate:
    """`memory_control.Requests` of one EngineCore. in_flight: its steps in flight. untold: outputs to give out."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarGate,
        supervisor: WorkerSupervisor,
        in_flight: Sized,
        untold: list[EngineCoreOutput],
    ) -> None:
        self._scheduler, self._grammars, self._supervisor = scheduler, grammars, supervisor
        self._in_flight, self._untold = in_flight, untold
        self.freeze, self.thaw = scheduler.freeze, scheduler.thaw

    def unfinished_ids(self) -> list[str]:
        return [*self._grammars.unfinished_ids, *self._scheduler.unfinished_ids]

    def is_paused(self) -> bool:
        return self._scheduler.paused is not None

    def abort_all(self) -> None:
        self._untold += self._grammars.abort(self._grammars.unfinished_ids)
        self._untold += self._scheduler.abort(self._scheduler.unfinished_ids)

    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def forget_kv_cache(self) -> None:
        assert not self._in_flight, "a step in flight reads the pages"
        is_empty = self._scheduler.reset_prefix_cache(preempt_running=True)
        assert is_empty, "a block has an owner that does not run"

    def lose_workers(self, error: Exception) -> None:
        text = error.message if isinstance(error, RingcoreError) else f"{type(error).__name__}: {error}"
        loss = EngineDeadError(f"a change of memory failed half way: {text}", process="engine")
        self._supervisor.note_loss(loss)
