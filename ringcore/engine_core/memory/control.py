"""Sleep, wake-up and weight updates: what the engine does with its requests and its workers for each, step by step.

A change of memory is a two-phase commit, so that a failure on any rank leaves everything as it was. First every rank
prepares (copies contents, maps memory; all of it can be rolled back). Once all ranks have prepared, the engine has them
commit, which allocates nothing. If a rank fails to commit, the engine replaces all workers.

A weight update cannot be rolled back, since it overwrites the old weights in place: from its start to its end the
weights are stale, and after a failure they stay so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, assert_never

from ringcore.engine_core.memory.operations import Steps
from ringcore.engine_core.memory.states import KV_CACHE, WEIGHTS, MemoryStates
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, SleepingError
from ringcore.executor.rpc_call import RpcFuture
from ringcore.protocol.messages import MemoryReport, MemoryState, SleepMode
from ringcore.protocol.operations import (
    FinishWeightUpdate,
    MemoryOperation,
    ReloadWeights,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
    WakeUp,
)

__all__ = ["MemoryControl", "Requests"]

RankReports = list[dict[str, float]]


class Requests(Protocol):
    """An engine's requests, as `MemoryControl` stops and resumes them."""

    def unfinished_ids(self) -> list[str]: ...

    def is_paused(self) -> bool: ...

    def abort_all(self) -> None: ...

    def freeze(self) -> None:
        """Stops scheduling steps."""

    def thaw(self) -> None: ...

    def num_in_flight(self) -> int: ...

    def drop_kv_cache(self) -> None:
        """Preempts the running requests and empties the prefix cache; no step may be in flight."""

    def weights_change(self) -> None: ...

    def lose_workers(self, error: Exception) -> None:
        """The workers' memory is in an unknown state. Raises `EngineDeadError` if they are not replaced."""


class MemoryControl:
    """The memory of one engine's workers. Its methods return operations (see `operations`), whose value is a
    `MemoryReport`; invalid arguments raise when the method is called.

    submit: calls a worker method, given its name and arguments.

    Invariant: scheduling is frozen exactly while an operation changes memory or `states.serves` is false.
    """

    def __init__(self, submit: Callable[[str, Sequence[Any]], RpcFuture], requests: Requests, can_sleep: bool) -> None:
        self.states = MemoryStates()
        self._submit, self._requests, self._can_sleep = submit, requests, can_sleep
        self._is_closing = False  # a sleep is in progress: new requests are refused
        self._needs_all = False  # the update in progress must supply every weight
        self._path: str | None = None  # the folder of the current weights, if not the checkpoint's
        self._has_new_weights = False

    def check_takes_requests(self) -> None:
        """Raises `SleepingError` if a request would not be computed."""
        self.states.check_takes_requests()
        if self._is_closing:
            raise SleepingError(
                "the engine is about to sleep; send requests before sleep(), or after wake_up()",
                tags=[],
                remedy="wake_up",
            )

    # -----------------------------------------------------------------------------------------------------------
    # Sleep and wake-up.

    def steps(self, operation: MemoryOperation) -> Steps:
        """What the engine does for an operation. Raises `InvalidRequestError`."""
        match operation:
            case Sleep(level, mode):
                self._check_can_sleep(level)
                return self._sleep(level, mode)
            case WakeUp(tags):
                return self._wake_up(tags)
            case StartWeightUpdate(mode):
                return self._start_update(mode)
            case UpdateWeights(source):
                return self._update(source, time.monotonic())
            case FinishWeightUpdate():
                return self._finish_update(time.monotonic())
            case ReloadWeights(path, mode):
                return self._reload(path, mode)
            case _:
                assert_never(operation)

    def _check_can_sleep(self, level: int) -> None:
        if level and not self._can_sleep:
            raise InvalidRequestError(
                f"level={level}: this engine cannot release its memory; construct it with enable_sleep_mode=True, "
                "or give level=0",
                field="level",
                value=level,
            )

    def _sleep(self, level: int, mode: SleepMode) -> Steps:
        started = time.monotonic()
        self._is_closing = level > 0
        try:
            yield from self._quiesce(mode)
            ranks = yield from self._change(self.states.sleep_target(level))
            self.states.is_stopped = self.states.is_stopped or level == 0
        finally:
            self._is_closing = False
            self._thaw_if_serving()
        return self._report(started, ranks)

    def _wake_up(self, tags: Sequence[str] | None) -> Steps:
        started = time.monotonic()
        ranks = yield from self._change(self.states.wake_target(tags))
        if not self.states.not_resident():
            self.states.is_stopped = False
        self._thaw_if_serving()
        return self._report(started, ranks)

    def _quiesce(self, mode: SleepMode) -> Steps:
        """Freezes scheduling and waits until no step is in flight."""
        match mode:
            case "abort":
                self._requests.abort_all()
            case "wait":
                ids = set(self._requests.unfinished_ids())
                if ids and self._requests.is_paused():
                    raise InvalidRequestError(
                        f"mode='wait': {len(ids)} requests are unfinished and the engine is paused; call resume() "
                        "first, or give mode='abort' or 'keep'",
                        field="mode",
                        value=mode,
                    )
                yield lambda: ids.isdisjoint(self._requests.unfinished_ids())
        self._requests.freeze()
        yield lambda: self._requests.num_in_flight() == 0

    def _change(self, target: Mapping[str, MemoryState]) -> Steps:
        """Both phases; -> each rank's report of them. Scheduling must be frozen."""
        if not target:
            return []
        try:
            prepared = yield self._submit("prepare_memory", [dict(target)])
        except EngineDeadError:
            raise
        except Exception:
            yield from self._infallible("roll_back_memory")
            raise
        if target.get(KV_CACHE) == "discarded":
            self._requests.drop_kv_cache()
        committed = yield from self._infallible("commit_memory")
        self.states.confirm(target)
        return [before | after for before, after in zip(prepared, committed, strict=True)]

    def _infallible(self, method: str) -> Steps:
        """A call that allocates nothing: if it fails, the workers' memory is in an unknown state."""
        try:
            return (yield self._submit(method, []))
        except EngineDeadError:
            raise
        except Exception as error:
            self._requests.lose_workers(error)
            raise

    def _thaw_if_serving(self) -> None:
        if self.states.serves:
            self._requests.thaw()

    def _report(self, started: float, ranks: RankReports) -> MemoryReport:
        return MemoryReport(self.states.as_dict(), time.monotonic() - started, ranks)

    # -----------------------------------------------------------------------------------------------------------
    # New weights.

    def _start_update(self, mode: SleepMode) -> Steps:
        started = time.monotonic()
        self.states.check_takes_weights()
        if self.states.is_updating:
            raise InvalidRequestError(
                "a weight update is in progress; call finish_weight_update() first, or reload_weights(path)",
                field="method",
                value="start_weight_update",
            )
        yield from self._begin(mode)
        return self._report(started, [])

    def _begin(self, mode: SleepMode) -> Steps:
        try:
            yield from self._quiesce(mode)
            yield self._submit("start_weight_update", [])
        except BaseException:
            self._thaw_if_serving()
            raise
        self._requests.weights_change()
        self._needs_all = self.states[WEIGHTS] == "stale"
        self._has_new_weights, self._path = True, None
        self.states.begin_update()

    def _update(self, source: dict[str, Any], started: float) -> Steps:
        """One chunk. source: see `Worker.update_weights`."""
        ranks = yield from self._in_update("update_weights", source)
        return self._report(started, ranks)

    def _finish_update(self, started: float) -> Steps:
        ranks = yield from self._in_update("finish_weight_update", self._needs_all)
        self.states.end_update()
        self._thaw_if_serving()
        return self._report(started, ranks)

    def _in_update(self, method: str, argument: Any) -> Steps:
        """A call that belongs to an update; if it fails, the update has failed."""
        if not self.states.is_updating:
            raise InvalidRequestError(
                f"{method}: no weight update is in progress; call start_weight_update() first",
                field="method",
                value=method,
            )
        try:
            return (yield self._submit(method, [argument]))
        except EngineDeadError:
            raise
        except RingcoreError as error:
            self.states.fail_update()
            raise _with_remedy(error) from error

    def _reload(self, path: str, mode: SleepMode) -> Steps:
        """A whole update from one folder or file; it replaces one in progress."""
        started = time.monotonic()
        self.states.check_takes_weights()
        yield from self._begin(mode)
        self._needs_all = True
        took = yield from self._in_update("update_weights", {"kind": "files", "path": path})
        finished = yield from self._in_update("finish_weight_update", True)
        self._path = path
        self.states.end_update()
        self._thaw_if_serving()
        return self._report(started, [_sums(*of_rank) for of_rank in zip(took, finished, strict=True)])

    # -----------------------------------------------------------------------------------------------------------
    # New workers.

    def workers_replaced(self) -> Steps | None:
        """The workers are new: all their memory is resident, with the checkpoint's weights. -> an operation that
        restores the state of the previous workers; None if there is nothing to restore."""
        not_resident, was = self.states.not_resident(), self.states[WEIGHTS]
        are_others = self._has_new_weights or was in ("stale", "discarded")
        self.states.reset("stale" if are_others else "resident")
        path = self._path if was in ("resident", "offloaded") else None
        if not not_resident and path is None:
            if self.states.serves:
                self._requests.thaw()
            else:
                self._requests.freeze()
            return None
        self._requests.freeze()
        return self._restore(not_resident, path)

    def _restore(self, not_resident: dict[str, MemoryState], path: str | None) -> Steps:
        if path is not None:
            yield from self._reload(path, "keep")
        if not not_resident:
            return
        yield from self._quiesce("keep")
        if WEIGHTS in not_resident and self.states[WEIGHTS] == "stale":
            not_resident[WEIGHTS] = "discarded"
        yield from self._change(not_resident)


def _sums(took: dict[str, float], finished: dict[str, float]) -> dict[str, float]:
    """One rank's report of an update: the seconds of both calls, and the counts of the last one."""
    return took | finished | {"seconds": took.get("seconds", 0.0) + finished.get("seconds", 0.0)}


def _with_remedy(error: RingcoreError) -> RingcoreError:
    """The error of a failed update, with the resulting state and the remedy."""
    return type(error)(
        f"{error.message}; the update has failed and the weights are stale: call start_weight_update() and send all of "
        "them, or reload_weights(path)",
        **error.details,
    )
