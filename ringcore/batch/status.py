"""How far a job is: for a person on a terminal, and as a JSON file for machines."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from ringcore.batch.disk import replace_file
from ringcore.batch.figures import Figures
from ringcore.batch.journal import DoneLines

__all__ = ["ProgressBar", "State", "Status"]

State = Literal["starting", "running", "stopping", "stopped", "complete", "failed"]


class Status:
    """The state of a job, and its file, which is replaced at once, so that a reader never sees half of one.

    path: None for no file.
    """

    def __init__(self, path: str | None, figures: Figures) -> None:
        self._path, self._figures = path, figures
        self.state: State = "starting"
        self.num_requests = 0
        self.num_in_flight = self.num_restarts = 0
        self.done: DoneLines | None = None
        self.error: str | None = None

    @property
    def num_done(self) -> int:
        return 0 if self.done is None else self.done.num_done

    @property
    def num_failed(self) -> int:
        return 0 if self.done is None else self.done.num_failed

    @property
    def eta_s(self) -> float | None:
        requests_per_s, _ = self._figures.rates()
        return None if requests_per_s <= 0 else (self.num_requests - self.num_done) / requests_per_s

    def as_json(self) -> dict[str, Any]:
        done, eta_s = self.done, self.eta_s
        return {
            "state": self.state,
            "pid": os.getpid(),
            "num_requests": self.num_requests,
            "num_done": self.num_done,
            "num_failed": self.num_failed,
            "num_in_flight": self.num_in_flight,
            "prompt_tokens": 0 if done is None else done.prompt_tokens,
            "output_tokens": 0 if done is None else done.output_tokens,
            "num_engine_restarts": self.num_restarts,
            "eta_s": None if eta_s is None else round(eta_s, 1),
            **self._figures.as_json(),
            "percentiles": self._figures.percentiles(),
            "error": self.error,
        }

    def write(self) -> None:
        """Raises `RingcoreError`."""
        if self._path is not None:
            replace_file(self._path, msgspec.json.encode(self.as_json()) + b"\n", is_synced=False)


class ProgressBar:
    """A line on stderr, by tqdm."""

    def __init__(self, status: Status, figures: Figures, *, is_shown: bool) -> None:
        from tqdm import tqdm

        self._status, self._figures = status, figures
        self._bar = tqdm(total=status.num_requests, initial=status.num_done, unit="req", disable=not is_shown)

    def show(self) -> None:
        _, tokens_per_s = self._figures.rates()
        self._bar.set_postfix_str(
            f"{self._status.num_failed} failed, {tokens_per_s:,.0f} tokens/s, "
            f"{self._figures.cache_hit_rate:.0%} cached",
            refresh=False,
        )
        self._bar.update(self._status.num_done - self._bar.n)

    def close(self) -> None:
        self.show()
        self._bar.close()
