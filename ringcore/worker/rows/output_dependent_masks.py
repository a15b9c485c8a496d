"""Token bitmasks that depend on a row's own output: grammars, and bad words of several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringcore.grammars import Grammars, Matcher
from ringcore.worker.rows.row_tables import ALL_BITS, BitmaskTable, mask_tokens

__all__ = ["OutputDependentMasks"]


@dataclass(slots=True)
class _MaskState:
    allowed: np.ndarray | None  # [num_words] int32 bitmask, independent of the output; None: the row has no bitmask
    bad_words: list[tuple[tuple[int, ...], int]]  # (prefix, the token that is masked after it)
    matcher: Matcher | None
    stop_token_ids: frozenset[int]
    num_seen: int = 0  # generated tokens processed, up to and including the first stop token
    is_over: bool = False  # the scheduler drops whatever it samples from now on
    masked: tuple[int, ...] = ()  # last tokens of bad words that its bitmask excludes now


class OutputDependentMasks:
    """The rows whose generated tokens must be known before they sample, and their token bitmasks."""

    def __init__(self, bitmasks: BitmaskTable) -> None:
        self._bitmasks = bitmasks
        self._rows: dict[int, _MaskState] = {}

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
        """bad_words: of two tokens or more. The caller has already stored the bitmask `allowed` of a row with bad words
        or a matcher."""
        split_words = [(tuple(word[:-1]), word[-1]) for word in bad_words]
        self._rows[row] = _MaskState(allowed, split_words, matcher, frozenset(stop_token_ids))

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def num_seen(self, row: int) -> int:
        """Generated tokens, up to and including the first stop token, as of the last `update`."""
        return self._rows[row].num_seen

    def update(
        self, rows: Sequence[int], generated: Callable[[int], np.ndarray], grammars: Grammars | None
    ) -> dict[int, str]:
        """Advances the states of `rows` by their new tokens and updates their bitmasks; -> error messages by row.

        generated: a row's generated tokens, [num_generated] int32, all of them known.
        """
        failed: dict[int, str] = {}
        with_matcher: list[int] = []
        for row in rows:
            state = self._rows.get(row)
            if state is None or state.is_over:
                continue
            token_ids = generated(row)
            error = _advance(state, token_ids)
            if error is not None:
                failed[row] = error
            if state.allowed is None:
                continue
            if state.is_over:
                self._bitmasks.set(row, ALL_BITS)
            elif state.matcher is not None:
                state.masked = _completing_tokens(state, token_ids)
                with_matcher.append(row)
            else:
                self._mask_bad_words(row, state, _completing_tokens(state, token_ids))
        if with_matcher:
            assert grammars is not None, "a row has a matcher, but the runner has no grammars"
            failed |= self._fill_from_matchers(with_matcher, grammars)
        return failed

    def _mask_bad_words(self, row: int, state: _MaskState, masked: tuple[int, ...]) -> None:
        if masked != state.masked:
            state.masked = masked
            self._bitmasks.set(row, _without_masked(state, state.allowed))

    def _fill_from_matchers(self, rows: Sequence[int], grammars: Grammars) -> dict[int, str]:
        """Fills the bitmasks of rows with a matcher; -> error messages by row."""
        failed: dict[int, str] = {}
        states = [self._rows[row] for row in rows]
        matchers = [state.matcher for state in states if state.matcher is not None]
        allowed = [state.allowed for state in states if state.allowed is not None]
        assert len(matchers) == len(allowed) == len(rows), "a row with a matcher has a bitmask"
        bitmasks = np.zeros((len(rows), len(allowed[0])), dtype=np.int32)
        grammars.fill_bitmasks(matchers, bitmasks)
        bitmasks &= np.stack(allowed)
        for row, state, matcher, bitmask in zip(rows, states, matchers, bitmasks, strict=True):
            if matcher.failure is None:
                self._bitmasks.set(row, _without_masked(state, bitmask))
            else:
                failed[row] = f"structured_outputs: {matcher.failure}"
                state.is_over = True
                self._bitmasks.set(row, ALL_BITS)
        return failed


def _advance(state: _MaskState, token_ids: np.ndarray) -> str | None:
    """Processes the row's new tokens, advancing its matcher; -> an error message, or None."""
    for token_id in token_ids[state.num_seen :].tolist():
        state.num_seen += 1
        if token_id in state.stop_token_ids:
            state.is_over = True
            return None
        if state.matcher is not None and not state.matcher.accept([token_id]):
            state.is_over = True
            return (
                f"structured_outputs: the grammar does not accept token {token_id}, sampled at position "
                f"{state.num_seen - 1} of the completion; try another structured_outputs_backend"
            )
    return None


def _completing_tokens(state: _MaskState, token_ids: np.ndarray) -> tuple[int, ...]:
    """The tokens that would complete a bad word now."""
    if not state.bad_words:
        return ()
    longest = max(len(prefix) for prefix, _ in state.bad_words)
    tail = tuple(token_ids[-longest:].tolist())
    return tuple(last for prefix, last in state.bad_words if tail[len(tail) - len(prefix) :] == prefix)


def _without_masked(state: _MaskState, bitmask: np.ndarray | None) -> np.ndarray:
    assert bitmask is not None, "a row without a bitmask masks nothing"
    if state.masked:
        bitmask = bitmask.copy()
        mask_tokens(bitmask, np.array(state.masked, dtype=np.int64))
    return bitmask
