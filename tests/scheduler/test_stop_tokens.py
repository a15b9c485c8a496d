"""One look for all stop tokens of all that run."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.scheduler.stop_tokens import StopTokens


def hits(stop_tokens: StopTokens, token_ids: list[int]) -> list[int] | None:
    found = stop_tokens.hits(np.array(token_ids, dtype=np.int32))
    return None if found is None else found.tolist()


def test_places_of_tokens_at_which_anybody_stops():
    stop_tokens = StopTokens(10)
    stop_tokens.add([2, 9])
    assert hits(stop_tokens, [1, 2, 3, 9, 2]) == [1, 3, 4]
    assert hits(stop_tokens, [0, 1, 8]) is None


def test_a_token_counts_as_long_as_one_stops_at_it():
    stop_tokens = StopTokens(10)
    stop_tokens.add([2])
    stop_tokens.add([2, 3])
    stop_tokens.remove([2])
    assert hits(stop_tokens, [2, 3]) == [0, 1]
    stop_tokens.check([2, 3])
    stop_tokens.remove([2, 3])
    assert hits(stop_tokens, [2, 3]) is None
    stop_tokens.check([])


def test_check_notices_a_wrong_count():
    stop_tokens = StopTokens(10)
    stop_tokens.add([2])
    with pytest.raises(AssertionError, match="wrong count"):
        stop_tokens.check([3])
