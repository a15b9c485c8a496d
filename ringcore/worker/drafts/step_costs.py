"""How long a step of so many tokens takes, against one of fewer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["COST_SIZES", "StepCosts"]

COST_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)  # tokens of the steps that are measured
_GUESSED = (1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.2, 7.4, 13.8)  # until they are: a token costs a tenth of a step


class StepCosts:
    """Linear between the measured sizes, and beyond the last one. Never less for more tokens: a step that took longer
    than one of more tokens was disturbed."""

    def __init__(
        self,
        sizes: Sequence[int] = COST_SIZES,
        seconds: Sequence[float] = _GUESSED,
        waited_s: float = 0.0,
        draft_seconds: Sequence[float] | None = None,
    ) -> None:
        """sizes, seconds: n > 1 each, sizes ascending from 1. waited_s: by how much a step without drafts is faster,
        where it is launched ahead. draft_seconds: of one more draft for each of so many rows; None: nothing."""
        self._waited_s = waited_s
        least = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
        self._seconds = np.interp(np.arange(sizes[-1] + 1), sizes, least)
        self._of_draft = np.zeros(1)
        if draft_seconds is not None:
            self._of_draft = np.interp(np.arange(sizes[-1] + 1), sizes, np.maximum.accumulate(draft_seconds))
        # A token beyond the last size costs what those before it cost on average: more than the last few may.
        self._slope = (least[-1] - least[0]) / (sizes[-1] - 1)

    def of_draft(self, num_rows: int) -> float:
        """One more draft of num_rows >= 1 rows, without its verification, against a step of theirs without drafts."""
        place = min(num_rows, len(self._of_draft) - 1), min(num_rows, len(self._seconds) - 1)
        return float(self._of_draft[place[0]] / self._seconds[place[1]])

    def relative(self, num_tokens: int, most: int, num_rows: int = 1) -> np.ndarray:
        """[most + 1]: the time of a step of num_tokens >= 1 known tokens and i drafts, against one without. num_rows:
        among which the drafts are divided."""
        sizes = np.arange(num_tokens, num_tokens + most + 1)
        last = len(self._seconds) - 1
        seconds = self._seconds[np.minimum(sizes, last)] + np.maximum(sizes - last, 0) * self._slope
        seconds[0] = max(seconds[0] - self._waited_s, seconds[0] / 2)
        of_draft = self._of_draft[min(num_rows, len(self._of_draft) - 1)]
        seconds += of_draft * -(-np.arange(most + 1) // num_rows)
        relative: np.ndarray = seconds / seconds[0]
        return relative
