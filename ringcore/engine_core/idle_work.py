"""What an engine does while it has nothing to do: it has its workers capture the CUDA graphs that are not there yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ringcore.engine_core.core import EngineCore
from ringcore.errors import EngineDeadError, WorkerDiedError
from ringcore.executor.base import RpcFuture
from ringcore.protocol.messages import EngineReady

__all__ = ["IdleWork"]

_log = logging.getLogger(__name__)

# What comes next would wait for the graph that is being captured, 50 to 100 ms for a model of 8B. Who has just asked
# for something often asks for more at once: the first request after a wake-up, a sleep after the last answer.
_QUIET_S = 0.5


class IdleWork:
    """One graph at a time, so that a request that comes meanwhile waits for no more than one. At the start it begins at
    once; after anything that the engine did, only when it has been quiet for a while. Captures are no such thing: they
    follow each other at once. An engine that is asked something more often than that captures graphs as they are met.

    A step that meets a size whose graph is missing captures it itself; so nothing depends on this work, and an error in
    it is logged and ends it. New workers have it before them again.

    Invariant: `_future` is the call under way, if there is one, of the workers that `_ready` describes, and is asked
    only while the engine is idle: asking any future takes in the replies of all, which others sleep on.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._clock = core, clock
        self._quiet_at = float("-inf")  # from then on it may begin, by the clock
        self._begin()

    def _begin(self) -> None:
        self._ready: EngineReady = self._core.ready
        self._num_left = self._ready.num_graphs_left
        self._future: RpcFuture | None = None

    def postpone(self) -> None:
        """The engine has just done something that it was asked for."""
        self._quiet_at = self._clock() + _QUIET_S

    def wait_s(self) -> float | None:
        """Until it has something to begin, if nothing happens before; None: nothing, or the engine's descriptors tell.
        0 is told only where `go_on` begins it."""
        if not self._has_work() or self._future is not None:
            return None
        return max(0.0, self._quiet_at - self._clock())

    def go_on(self) -> bool:
        """For a loop that would sleep now until something happens: begins the next call, or takes in the reply of the
        one under way. False where that is all that can be done before `wait_s` has passed or the engine's descriptors
        tell of something.

        Raises `EngineDeadError` where the workers died and are not replaced.
        """
        if not self._has_work():
            return False
        if self._future is None:
            if self._clock() < self._quiet_at:
                return False
            self._future = self._core.capture_graph()
        if not self._future.done():
            return False
        self._take_reply(self._future)
        return True

    def _has_work(self) -> bool:
        if self._ready is not self._core.ready:
            self._begin()
        return self._num_left > 0 and self._core.is_idle

    def _take_reply(self, future: RpcFuture) -> None:
        self._future = None
        try:
            self._num_left = max(future.result())
        except WorkerDiedError:  # and the engine is about to replace it
            self._num_left = 0
        except EngineDeadError:
            raise
        except Exception:
            self._num_left = 0
            _log.warning("a CUDA graph could not be captured; those left are captured as they are met", exc_info=True)
