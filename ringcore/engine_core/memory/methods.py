"""Sleep, wake-up and new weights, as every front end of an engine has them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ringcore.protocol.messages import MemoryReport, SleepMode
from ringcore.weights import weight_source

__all__ = ["OPERATIONS", "MemoryMethods"]

# The methods that take several turns of the engine. They can be called like an `@rpc` method of the workers too
# (`collective_rpc`): the engine does them, and what each rank tells is that rank's value.
OPERATIONS = (
    "sleep",
    "wake_up",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
)


class MemoryMethods(ABC):
    """Each call returns when all ranks have done it. `timeout`: seconds until `RpcTimeoutError`; the engine goes on.

    Raises what went wrong, `WorkerError`, `CapacityError`, `EngineDeadError`; then a sleep or wake-up changed nothing.
    """

    @abstractmethod
    def _operate(self, name: str, kwargs: Mapping[str, Any], timeout: float | None) -> MemoryReport:
        """Has the engine do one of `OPERATIONS`."""

    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether it slept and has not wholly woken. Stale weights alone are no sleep: see `health().memory`."""

    def sleep(self, level: int = 1, mode: SleepMode = "abort", timeout: float | None = None) -> MemoryReport:
        """Gives the device's memory back, and keeps its addresses: CUDA graphs stay valid.

        level: 1 copies the weights to host memory and discards the KV cache; 2 discards both: after a wake-up the
            weights are stale until all of them are given (`reload_weights`); 0 only stops computing.
        mode: of requests that are not finished: "abort" ends them with finish reason "abort"; "wait" finishes them
            first; "keep" lets them go on after the wake-up, computed again from the tokens they have.

        1 and 2 need the option enable_sleep_mode. What is given back must not be touched: see to it that no worker
        method of your own (`worker_extension`) does. Meanwhile new requests raise `SleepingError`; with 0 they queue.
        Sleeping deeper than before is fine, sleeping again changes nothing. A failure on any rank, for want of host
        memory say, undoes all: `CapacityError`.
        """
        return self._operate("sleep", {"level": level, "mode": mode}, timeout)

    def wake_up(self, tags: Sequence[str] | None = None, timeout: float | None = None) -> MemoryReport:
        """Takes the memory again: of all, or of the tags named, "weights" and "kv_cache", in any order.

        Once all is there requests are computed again. Waking what is awake changes nothing. Where the device has too
        little memory left nothing changes on any rank, and the `CapacityError` says how much was needed and free.
        """
        return self._operate("wake_up", {"tags": None if tags is None else list(tags)}, timeout)

    def start_weight_update(self, mode: SleepMode = "keep", timeout: float | None = None) -> MemoryReport:
        """Begins to put new weights in place of the old ones. mode: as for `sleep`; by default requests that run are
        computed again, from the tokens they have, with the new weights.

        Until `finish_weight_update` the weights are stale: requests raise `SleepingError`. The prefix cache is
        forgotten.
        """
        return self._operate("start_weight_update", {"mode": mode}, timeout)

    def update_weights(
        self,
        weights: str | os.PathLike[str] | Mapping[str, Any],
        timeout: float | None = None,
    ) -> MemoryReport:
        """One chunk of an update, of any number.

        weights: a folder of safetensors files, or one such file; or torch tensors by name, whole, as a checkpoint has
            them: on the host they go through shared memory, on a GPU by CUDA's inter-process handles to the rank of
            that GPU; or `{"kind": "group", "tensors": [...]}`, which a trainer broadcasts (see
            `ringcore.weights.WeightGroup`).

        A chunk that fails, for an unknown name or a wrong shape say, fails the update: the weights stay stale, and the
        error says so.
        """
        with _as_source(weights) as source:
            return self._operate("update_weights", {"source": source}, timeout)

    def finish_weight_update(self, timeout: float | None = None) -> MemoryReport:
        """Ends an update; requests are computed with the new weights from now on.

        Where the weights were stale when it began, every one must have come: else `InvalidRequestError` names what is
        missing, and the update has failed.
        """
        return self._operate("finish_weight_update", {}, timeout)

    def reload_weights(
        self, path: str | os.PathLike[str], mode: SleepMode = "keep", timeout: float | None = None
    ) -> MemoryReport:
        """A whole update from a safetensors folder (or file) of the same model; one that was begun is given up."""
        return self._operate("reload_weights", {"path": os.fspath(path), "mode": mode}, timeout)


def _as_source(weights: Any) -> AbstractContextManager[dict[str, Any]]:
    if isinstance(weights, Mapping) and isinstance(weights.get("kind"), str):
        return nullcontext(dict(weights))
    return weight_source(weights)
