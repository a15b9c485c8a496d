"""Background work of an idle engine: its workers capture the CUDA graphs that are still missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ringcore.engine_core.core import EngineCore
from ringcore.errors import EngineDeadError, WorkerDiedError
from ringcore.executor.rpc_call import RpcFuture
from ringcore.protocol.messages import EngineReady

__all__ = ["IdleWork"]

_log = logging.getLogger(__name__)

# A request that arrives during a capture waits for it, 50 to 100 ms for an 8B model. One call is often followed by
# another at once: the first request after a wake-up, a sleep after the last answer.
_QUIET_S = 0.5


class IdleWork:
    """One graph at a time, so that a new request waits for at most one capture. After start-up it begins at once; after
    any other work of the engine, only once the engine has been quiet for a while. Captures follow each other without a
    pause. In an engine that is never quiet for that long, steps capture the graphs that they miss often.

    A step whose size has no graph yet takes a larger one, or none; so nothing depends on this work, and an error in it
    is logged and ends it. It starts over with new workers.

    Invariant: `_future` is the call in flight, if any, to the workers that `_ready` describes, and is checked only
    while the engine is idle: checking any future drains the replies of all, for which the loop may be polling.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._clock = core, clock
        self._quiet_at = float("-inf")  # clock time from which captures may begin
        self._begin()

    def _begin(self) -> None:
        self._ready: EngineReady = self._core.ready
        self._num_left = self._ready.num_graphs_left
        self._future: RpcFuture | None = None

    def postpone(self) -> None:
        """Restarts the quiet period: the engine has just worked for its client."""
        self._quiet_at = self._clock() + _QUIET_S

    def wait_s(self) -> float | None:
        """Seconds until the next capture may begin; None if there is none, or if the engine's descriptors will signal.
        0 only if `advance` would begin it."""
        if not self._has_work() or self._future is not None:
            return None
        return max(0.0, self._quiet_at - self._clock())

    def advance(self) -> bool:
        """Called by the loop before it polls: submits the next capture, or applies the reply of the one in flight.
        False if nothing more can be done until `wait_s` has passed or one of the engine's descriptors is readable.

        Raises `EngineDeadError` if the workers died and are not replaced.
        """
        if not self._has_work():
            return False
        if self._future is None:
            if self._clock() < self._quiet_at:
                return False
            self._future = self._core.capture_graph()
        if not self._future.done():
            return False
        self._apply_reply(self._future)
        return True

    def _has_work(self) -> bool:
        if self._ready is not self._core.ready:
            self._begin()
        return self._num_left > 0 and self._core.is_idle

    def _apply_reply(self, future: RpcFuture) -> None:
        self._future = None
        try:
            self._num_left = max(future.result())
        except WorkerDiedError:  # the engine is about to replace the workers
            self._num_left = 0
        except EngineDeadError:
            raise
        except Exception:
            self._num_left = 0
            _log.warning("a CUDA graph could not be captured; steps capture those that they miss often", exc_info=True)
