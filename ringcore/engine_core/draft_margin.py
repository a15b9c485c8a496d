"""Speculative decoding: what a step with drafts must promise, by what such steps turned out to bring.

A worker expects of a step with drafts so many times the tokens a second of one without, from the odds of the drafts and
from costs that were measured at start-up. Whether that is so shows in the engine alone, which sees how long each step
took and what it brought. Where steps with drafts have brought less than those without, the workers are told to ask for
more; the demand falls again by time, so that it is tried again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

__all__ = ["DraftMargin"]

FIRST, MOST = 1.15, 16.0
_RAISE, _LOWER = 1.25, 0.9  # after `_NUM_TRIED` steps with drafts
_NUM_TRIED = 8
_LEAST_GAIN, _CLEAR_GAIN = 1.02, 1.2  # below the first the demand rises, above the other it falls
_EASE = 0.998  # for each step without drafts
_PLAIN_EVERY = 32  # steps with drafts: then one without, whose time the others are compared with
_NUM_PLAIN = 5  # of which the median counts


@dataclass(slots=True)
class _Sizes:
    """Of steps with about so many rows."""

    margin: float = FIRST
    num_since_plain: int = _PLAIN_EVERY  # the first step is one without drafts
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PLAIN))  # seconds a row
    num_tried: int = 0
    num_gained: int = 0
    tried_s: float = 0.0


class DraftMargin:
    """Apart for each power of two of rows.

    With several steps in flight a step without drafts is launched while the one before is computed, but not after one
    with drafts: such a step takes longer than those that it stands for, and is not counted.
    """

    def __init__(self, num_in_flight: int = 1) -> None:
        self._waits_after_drafts, self._had_drafts = num_in_flight > 1, False
        self._sizes: defaultdict[int, _Sizes] = defaultdict(_Sizes)

    def next(self, num_rows: int) -> float:
        """For a step that decodes num_rows rows: how many times the tokens a second of one without drafts it must
        promise. Infinite for a step that must have none."""
        sizes = self._sizes[num_rows.bit_length()]
        return float("inf") if sizes.num_since_plain >= _PLAIN_EVERY else sizes.margin

    def record(self, num_rows: int, num_gained: int, seconds: float, has_drafts: bool) -> None:
        """A step of num_rows rows, all of which decode, brought num_gained tokens."""
        sizes = self._sizes[num_rows.bit_length()]
        has_waited, self._had_drafts = self._waits_after_drafts and self._had_drafts, has_drafts
        if not has_drafts:
            if has_waited:
                return
            sizes.plain_s.append(seconds / num_rows)
            sizes.num_since_plain = 0
            sizes.margin = max(FIRST, sizes.margin * _EASE)
            return
        sizes.num_since_plain += 1
        sizes.num_tried += 1
        sizes.num_gained += num_gained
        sizes.tried_s += seconds
        if sizes.num_tried < _NUM_TRIED or not sizes.plain_s:
            return
        gain = sizes.num_gained * median(sizes.plain_s) / sizes.tried_s
        if gain < _LEAST_GAIN:
            sizes.margin = min(MOST, sizes.margin * _RAISE)
        elif gain > _CLEAR_GAIN:
            sizes.margin = max(FIRST, sizes.margin * _LOWER)
        sizes.num_tried, sizes.num_gained, sizes.tried_s = 0, 0, 0.0
