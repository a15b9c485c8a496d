"""Follows one engine: its last samples, and whether it answers. It outlives the engine, whose last picture it keeps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from ringcore.cli.top.sample import Pace, Sample, pace_between
from ringcore.cli.top.source import Action, Choice, EngineSource
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError

__all__ = ["HISTORY", "Contact", "Monitor", "View"]

HISTORY = 240  # samples of which the rates are kept

# "connecting": no answer yet. "silent": it hangs, or replaces its workers. "ended": it is gone, or refuses us.
Contact = Literal["connecting", "live", "silent", "ended"]


class View(NamedTuple):
    """What there is to show. trouble: why there is no newer sample. answered_s: of the last sample, on the caller's
    clock. token_rates: generated tokens/s, the newest last."""

    name: str
    contact: Contact
    sample: Sample | None = None
    pace: Pace | None = None
    trouble: str | None = None
    answered_s: float | None = None
    token_rates: tuple[float, ...] = ()


class Monitor:
    """One thread polls; `act` may be called by another."""

    def __init__(self, choice: Choice, now: Callable[[], float] = time.monotonic) -> None:
        self._choice, self._now = choice, now
        self._source: EngineSource | None = None
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._first_s = now()
        self.view = View(choice.name, "connecting")

    def poll(self) -> View:
        """Asks once, and connects if it has to. Takes seconds if the engine is silent; never raises `RingcoreError`."""
        try:
            if self._source is None:
                self._source = self._choice.connect()
            sample = self._source.sample()
        except RpcTimeoutError as error:
            self.view = self.view._replace(contact="silent", trouble=error.message)
        except RingcoreError as error:
            self._disconnect()
            self.view = self.view._replace(contact="ended", trouble=error.message)
        else:
            self.view = self._next(sample)
        return self.view

    def _next(self, sample: Sample) -> View:
        last = self.view.sample
        pace = None if last is None else pace_between(last, sample)
        if last is not None and last.engine.about.pids.get("engine") != sample.engine.about.pids.get("engine"):
            self._rates.clear()  # another engine at the same address
        if pace is not None:
            self._rates.append(pace.generated_tokens_per_s)
        return View(self._choice.name, "live", sample, pace, None, self._now(), tuple(self._rates))

    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return self._now() - (self._first_s if self.view.answered_s is None else self.view.answered_s)

    def act(self, action: Action) -> object:
        """Raises `RingcoreError`."""
        return self._live_source().act(action)

    def dump(self) -> Path:
        """Raises `RingcoreError` and OSError."""
        return self._live_source().dump()

    def _live_source(self) -> EngineSource:
        source = self._source
        if source is None:
            raise EngineDeadError(f"{self._choice.name}: it has ended; press e to choose another one", process="engine")
        return source

    def _disconnect(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def close(self) -> None:
        self._disconnect()
