"""Sleep, wake-up and weight updates: the methods that every front end of an engine has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from ringcore.protocol.messages import MemoryReport, SleepMode
from ringcore.protocol.operations import (
    FinishWeightUpdate,
    MemoryOperation,
    ReloadWeights,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
    WakeUp,
    checked_operation,
)
from ringcore.weights import weight_source

__all__ = ["MemoryMethods"]


class MemoryMethods(ABC):
    """Each call returns when all ranks are done. `timeout`: seconds until `RpcTimeoutError`; the engine still finishes
    the operation.

    Raises `WorkerError`, `CapacityError`, `EngineDeadError`; a sleep or wake-up that failed has changed nothing.
    """

    @abstractmethod
    def _operate(self, operation: MemoryOperation, timeout: float | None) -> MemoryReport:
        """Has the engine execute an operation, whose fields are checked already."""

    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether some memory has not been woken since the last sleep. Stale weights alone do not count: see
        `health().memory`."""

    def sleep(self, level: int = 1, mode: SleepMode = "abort", timeout: float | None = None) -> MemoryReport:
        """Releases device memory and keeps its virtual addresses: CUDA graphs stay valid.

        level: 1 copies the weights to host memory and discards the KV cache; 2 discards both: after a wake-up the
            weights are stale until all of them are supplied (`reload_weights`); 0 only stops computing.
        mode: of unfinished requests: "abort" ends them with finish reason "abort"; "wait" finishes them first; "keep"
            resumes them after the wake-up, recomputed from the tokens they have.

        1 and 2 need the option enable_sleep_mode. No worker method of your own (`worker_extension`) may access released
        memory. Meanwhile new requests raise `SleepingError`; with 0 they queue. A deeper sleep may follow a lighter
        one, repeating one changes nothing. A failure on any rank, such as too little host memory, rolls all ranks back:
        `CapacityError`.
        """
        return self._operate(checked_operation(Sleep(cast(Any, level), mode)), timeout)

    def wake_up(self, tags: Sequence[str] | None = None, timeout: float | None = None) -> MemoryReport:
        """Maps the memory again: all of it, or that of the named tags, "weights" and "kv_cache", in any order.

        Once all memory is resident requests are computed again. Waking a resident tag changes nothing. If the device
        has too little free memory nothing changes on any rank; the `CapacityError` has the bytes needed and free.
        """
        return self._operate(checked_operation(WakeUp(cast(Any, tags))), timeout)

    def start_weight_update(self, mode: SleepMode = "keep", timeout: float | None = None) -> MemoryReport:
        """Begins to overwrite the weights in place. mode: as for `sleep`; by default running requests are preempted and
        recomputed, from the tokens they have, with the new weights.

        Until `finish_weight_update` the weights are stale: requests raise `SleepingError`. The prefix cache is emptied.
        """
        return self._operate(checked_operation(StartWeightUpdate(mode)), timeout)

    def update_weights(
        self,
        weights: str | os.PathLike[str] | Mapping[str, Any],
        timeout: float | None = None,
    ) -> MemoryReport:
        """One chunk of an update, of any number.

        weights: a folder of safetensors files, or one such file; or torch tensors by name, unsliced, as a checkpoint
            has them: on the host they go through shared memory, on a GPU by CUDA IPC handles to the rank of that GPU;
            or `{"kind": "group", "tensors": [...]}`, which a trainer broadcasts (see `ringcore.weights.WeightGroup`).

        A chunk that fails, such as for an unknown name or a wrong shape, fails the update: the weights stay stale, and
        the error says so.
        """
        with _as_source(weights) as source:
            return self._operate(checked_operation(UpdateWeights(source)), timeout)

    def finish_weight_update(self, timeout: float | None = None) -> MemoryReport:
        """Ends an update; requests are then computed with the new weights.

        If the weights were stale before the update, it must have supplied every one: else `InvalidRequestError` names
        the missing ones, and the update has failed.
        """
        return self._operate(FinishWeightUpdate(), timeout)

    def reload_weights(
        self, path: str | os.PathLike[str], mode: SleepMode = "keep", timeout: float | None = None
    ) -> MemoryReport:
        """A whole update from a safetensors folder (or file) of the same model; it replaces one in progress."""
        return self._operate(checked_operation(ReloadWeights(os.fspath(path), mode)), timeout)


def _as_source(weights: Any) -> AbstractContextManager[dict[str, Any]]:
    if isinstance(weights, Mapping) and isinstance(weights.get("kind"), str):
        return nullcontext(dict(weights))
    return weight_source(weights)
