"""What an engine does while it has nothing to do: it has its workers capture the CUDA graphs that are not there yet."""

from __future__ import annotations

import logging

from ringcore.engine_core.core import EngineCore
from ringcore.errors import EngineDeadError, WorkerDiedError
from ringcore.executor.base import RpcFuture
from ringcore.protocol import EngineReady

__all__ = ["IdleWork"]

_log = logging.getLogger(__name__)


class IdleWork:
    """One graph at a time, so that a request that comes meanwhile waits for no more than one.

    A step that meets a size whose graph is missing captures it itself; so nothing depends on this work, and an error in
    it is logged and ends it. New workers have it before them again.

    Invariant: `_future` is the call under way, if there is one, of the workers that `_ready` describes, and is asked
    only while the engine is idle: asking any future takes in the replies of all, which others sleep on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._begin()

    def _begin(self) -> None:
        self._ready: EngineReady = self._core.ready
        self._num_left = self._ready.num_graphs_left
        self._future: RpcFuture | None = None

    def go_on(self) -> bool:
        """For a loop that would sleep now until something happens: begins the next call, or takes in the reply of the
        one under way. False where that is all that can be done before the engine's descriptors tell of something.

        Raises `EngineDeadError` where the workers died and are not replaced.
        """
        if self._ready is not self._core.ready:
            self._begin()
        if not self._num_left or not self._core.is_idle:
            return False
        if self._future is None:
            self._future = self._core.capture_graph()
        if not self._future.done():
            return False
        self._take_reply(self._future)
        return True

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
