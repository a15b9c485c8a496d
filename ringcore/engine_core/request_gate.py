"""Stops and resumes an engine's requests for changes of its memory."""

from __future__ import annotations

from collections.abc import Sized

from ringcore.engine_core.grammar_gate import GrammarGate
from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.protocol.requests import EngineCoreOutput
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["RequestGate"]


class RequestGate:
    """Implements `memory.control.Requests`. in_flight: the steps in flight. pending_outputs: receives the last outputs
    of aborted requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarGate,
        supervisor: WorkerSupervisor,
        in_flight: Sized,
        pending_outputs: list[EngineCoreOutput],
    ) -> None:
        self._scheduler, self._grammars, self._supervisor = scheduler, grammars, supervisor
        self._in_flight, self._pending_outputs = in_flight, pending_outputs
        self.freeze, self.thaw = scheduler.freeze, scheduler.thaw

    def unfinished_ids(self) -> list[str]:
        return [*self._grammars.unfinished_ids, *self._scheduler.unfinished_ids]

    def is_paused(self) -> bool:
        return self._scheduler.paused is not None

    def abort_all(self) -> None:
        self._pending_outputs += self._grammars.abort(self._grammars.unfinished_ids)
        self._pending_outputs += self._scheduler.abort(self._scheduler.unfinished_ids)

    def num_in_flight(self) -> int:
        return len(self._in_flight) + len(self._scheduler.loading.in_flight)

    def drop_kv_cache(self) -> None:
        assert not self._in_flight, "a step in flight reads the pages"
        is_empty = self._scheduler.reset_prefix_cache(preempt_running=True)
        assert is_empty, "a block has a reference that no running request holds"

    def weights_change(self) -> None:
        """Keys and values, those beyond the device too, are of the old weights."""
        self.drop_kv_cache()
        if self._scheduler.store is not None:
            self._scheduler.store.weights_changed()

    def lose_workers(self, error: Exception) -> None:
        text = error.message if isinstance(error, RingcoreError) else f"{type(error).__name__}: {error}"
        loss = EngineDeadError(f"a change of memory failed half way: {text}", process="engine")
        self._supervisor.record_loss(loss)
