"""Rows whose next token depends on what they have written so far: by a grammar, by words that must not be completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringcore.grammars import Grammars, Matcher
from ringcore.worker.rows.row_tables import ALL_BITS, MaskTable, bar_tokens

__all__ = ["FollowedRows"]


@dataclass(slots=True)
class _Followed:
    allowed: np.ndarray | None  # [num_words] int32: what may be sampled at any time; None: the row has no mask
    bad_words: list[tuple[tuple[int, ...], int]]  # after these tokens, not that one
    matcher: Matcher | None
    stop_token_ids: frozenset[int]
    num_seen: int = 0  # generated tokens that were looked at, up to and with the first stop token
    is_over: bool = False  # whatever it samples now is dropped
    barred: tuple[int, ...] = ()  # the ends of bad words that its mask bars


class FollowedRows:
    """The rows that need to know their tokens before they sample, and their masks."""

    def __init__(self, masks: MaskTable) -> None:
        self._masks = masks
        self._rows: dict[int, _Followed] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def admit(
        self,
        row: int,
        allowed: np.ndarray | None,
        bad_words: Sequence[Sequence[int]],
        matcher: Matcher | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        """bad_words: of two tokens or more. A row with them or a matcher has a mask already, `allowed`."""
        words = [(tuple(word[:-1]), word[-1]) for word in bad_words]
        self._rows[row] = _Followed(allowed, words, matcher, frozenset(stop_token_ids))

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def num_seen(self, row: int) -> int:
        """Generated tokens, up to and with the first stop token, as of the last `update`."""
        return self._rows[row].num_seen

    def update(
        self, rows: Sequence[int], generated: Callable[[int], np.ndarray], grammars: Grammars | None
    ) -> dict[int, str]:
        """Brings the masks of those of `rows` that are followed to where the rows stand; -> what went wrong, by row.

        generated: what a row has written, [num_generated] int32, all of it known.
        """
        failed: dict[int, str] = {}
        guided: list[int] = []
        for row in rows:
            state = self._rows.get(row)
            if state is None or state.is_over:
                continue
            token_ids = generated(row)
            wrong = _advance(state, token_ids)
            if wrong is not None:
                failed[row] = wrong
            if state.allowed is None:
                continue
            if state.is_over:
                self._masks.set(row, ALL_BITS)
            elif state.matcher is not None:
                state.barred = _next_barred(state, token_ids)
                guided.append(row)
            else:
                self._bar(row, state, _next_barred(state, token_ids))
        if guided:
            assert grammars is not None, "a row has a matcher from nowhere"
            failed |= self._fill(guided, grammars)
        return failed

    def _bar(self, row: int, state: _Followed, barred: tuple[int, ...]) -> None:
        if barred != state.barred:
            state.barred = barred
            self._masks.set(row, _without(state, state.allowed))

    def _fill(self, rows: Sequence[int], grammars: Grammars) -> dict[int, str]:
        """The masks of rows with a matcher; -> what went wrong, by row."""
        failed: dict[int, str] = {}
        states = [self._rows[row] for row in rows]
        matchers = [state.matcher for state in states if state.matcher is not None]
        allowed = [state.allowed for state in states if state.allowed is not None]
        assert len(matchers) == len(allowed) == len(rows), "a row with a matcher has a mask"
        found = np.zeros((len(rows), len(allowed[0])), dtype=np.int32)
        grammars.fill_masks(matchers, found)
        found &= np.stack(allowed)
        for row, state, matcher, words in zip(rows, states, matchers, found, strict=True):
            if matcher.failure is None:
                self._masks.set(row, _without(state, words))
            else:
                failed[row] = f"structured_outputs: {matcher.failure}"
                state.is_over = True
                self._masks.set(row, ALL_BITS)
        return failed


def _advance(state: _Followed, token_ids: np.ndarray) -> str | None:
    """Takes in what is new of the row's tokens; -> what is wrong with them."""
    for token_id in token_ids[state.num_seen :].tolist():
        state.num_seen += 1
        if token_id in state.stop_token_ids:
            state.is_over = True
            return None
        if state.matcher is not None and not state.matcher.accept([token_id]):
            state.is_over = True
            return (
                f"structured_outputs: the grammar does not take token {token_id}, sampled at position "
                f"{state.num_seen - 1} of the completion; try another structured_outputs_backend"
            )
    return None


def _next_barred(state: _Followed, token_ids: np.ndarray) -> tuple[int, ...]:
    if not state.bad_words:
        return ()
    longest = max(len(before) for before, _ in state.bad_words)
    ends = tuple(token_ids[-longest:].tolist())
    return tuple(last for before, last in state.bad_words if ends[len(ends) - len(before) :] == before)


def _without(state: _Followed, words: np.ndarray | None) -> np.ndarray:
    assert words is not None, "a row without a mask bars nothing"
    if state.barred:
        words = words.copy()
        bar_tokens(words, np.array(state.barred, dtype=np.int64))
    return words
