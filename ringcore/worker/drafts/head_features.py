"""Features that a head has not computed yet: what the model's steps left, position by position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload

__all__ = ["MOST_PENDING", "Due", "HeadFeatures"]

MOST_PENDING = 2048  # tokens, beside those of a step


class Due(NamedTuple):
    """Tokens to compute, row after row, of each row in order."""

    rows: np.ndarray  # [n] int32
    starts: np.ndarray  # [n] int64: the first position of each
    counts: np.ndarray  # [n] int64, at least 1
    tapped: torch.Tensor  # [sum of counts, width]


class _Step(NamedTuple):
    """What one step left: tokens [n]."""

    rows: np.ndarray
    positions: np.ndarray
    admissions: np.ndarray  # of the row at that time
    tapped: torch.Tensor  # [n, width]


class HeadFeatures:
    """A position may be given several times: what was computed after a draft that turned out wrong is computed again.
    The last one counts."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        self._max_len = max_len
        self._steps: list[_Step] = []
        self.begins = np.zeros(max_rows, dtype=np.int64)  # of each row the first position that is not taken
        self.is_followed = np.zeros(max_rows, dtype=bool)

    def admit(self, row: int, begin: int, is_followed: bool) -> None:
        """begin: its first position that the model computes."""
        self.begins[row], self.is_followed[row] = begin, is_followed

    @property
    def num_pending(self) -> int:
        return sum(len(step.rows) for step in self._steps)

    def add(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray | None,
        admissions: np.ndarray,
        tapped: torch.Tensor,
        must_copy: bool,
    ) -> None:
        """A step has computed counts[i] positions of row rows[i] from starts[i] on, None: one each; of rows [n], which
        were admitted for the admissions[i]-th time. tapped: [num_tokens, width], row after row. must_copy: it is
        overwritten before `take`."""
        of_token = rows if counts is None else np.repeat(rows, counts)
        positions = starts
        if counts is not None:
            firsts = np.cumsum(counts) - counts
            positions = np.arange(len(of_token)) + np.repeat(starts - firsts, counts)
            admissions = np.repeat(admissions, counts)
        is_followed = self.is_followed[of_token]
        if not is_followed.any():
            return
        if is_followed.all():
            tapped = tapped.clone() if must_copy else tapped
        else:
            tapped = _rows_of(tapped, np.flatnonzero(is_followed))
        self._steps.append(_Step(of_token[is_followed], positions[is_followed], admissions[is_followed], tapped))

    def take(self, num_known: np.ndarray, admissions: np.ndarray) -> Due | None:
        """What can be computed: positions whose next token is known, without a gap after those that were taken.

        num_known: [max_rows], the known tokens of each row; admissions: [max_rows], how often each was admitted. None:
        there is nothing. A row with a gap is not followed any more.
        """
        if not self._steps:
            return None
        rows, positions, given = (np.concatenate([step[field] for step in self._steps]) for field in range(3))
        is_open = (given == admissions[rows]) & self.is_followed[rows] & (positions >= self.begins[rows])
        is_due = is_open & (positions < num_known[rows] - 1)
        is_later = is_open & ~is_due
        due, later = np.flatnonzero(is_due), np.flatnonzero(is_later)
        # The last of each position, in the order of rows and positions.
        keys = rows[due].astype(np.int64) * self._max_len + positions[due]
        _, from_end = np.unique(keys[::-1], return_index=True)
        due = due[len(due) - 1 - from_end]
        taken = self._contiguous(rows[due], positions[due])
        due = due[taken]
        whole = self._steps[0].tapped if len(self._steps) == 1 else torch.cat([step.tapped for step in self._steps])
        self._steps = [_Step(rows[later], positions[later], given[later], _rows_of(whole, later))] if len(later) else []
        if not len(due):
            return None
        of_rows, firsts, counts = np.unique(rows[due], return_index=True, return_counts=True)
        self.begins[of_rows] = positions[due][firsts] + counts
        is_whole = len(due) == len(whole) and bool((np.diff(due) == 1).all())
        return Due(of_rows, positions[due][firsts], counts, whole if is_whole else _rows_of(whole, due))

    def _contiguous(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[n] bool: of positions [n] of rows [n], sorted by both, those without a gap after `begins`."""
        if not len(rows):
            return np.zeros(0, dtype=bool)
        _, firsts, counts = np.unique(rows, return_index=True, return_counts=True)
        expected = self.begins[rows] + np.arange(len(rows)) - np.repeat(firsts, counts)
        is_there: np.ndarray = positions == expected
        self.is_followed[rows[~is_there]] = False
        return is_there


def _rows_of(tensor: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """A copy of these rows."""
    return tensor.index_select(0, upload(index.astype(np.int64), tensor.device))
