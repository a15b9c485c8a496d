"""What is refused at the door, and what a request is given there. 5 blocks of 4 tokens, a vocabulary of 50."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_driver import Driver

from ringcore.errors import InvalidRequestError

A = list(range(1, 9))  # two blocks of 4
B = list(range(11, 19))


def sent(prompt: list[int]) -> bytes:
    """As the front end sends it."""
    return np.array(prompt, np.int32).tobytes()


class TestRefusal:
    @pytest.mark.parametrize(
        ("prompt", "params", "text"),
        [
            ([], {}, "prompt is empty"),
            ([1, 2, 50], {}, "50 at position 2 is not in the vocabulary; give integers from 0 to 49"),
            ([1, -1], {}, "-1 at position 1"),
            ([2**40], {}, "1099511627776 at position 0"),
            ([1, "x"], {}, "'x' at position 1"),
            (b"", {}, "prompt is empty"),
            (sent([1, 2, 50]), {}, "50 at position 2 is not in the vocabulary; give integers from 0 to 49"),
            (sent([1, -1]), {}, "-1 at position 1"),
            (sent([1, 2])[:-1], {}, "give a list of token ids"),
            ([1] * 30, {}, "30 tokens and max_model_len is 30; shorten it to 29"),
            ([1] * 21, {}, "needs 6 blocks of the KV cache, which has 5; shorten it to 20"),
            ([1], {"stop_token_ids": [3, 50]}, "stop_token_ids: token id 50 at position 1"),
        ],
    )
    def test_says_why(self, prompt, params, text):
        engine = Driver(num_blocks=6, max_model_len=30)
        with pytest.raises(InvalidRequestError, match=text) as error:
            engine.add("a", prompt, **params)
        assert error.value.details["field"] in ("prompt_token_ids", "stop_token_ids")
        assert not engine.scheduler.has_unfinished

    def test_duplicate_id(self):
        engine = Driver()
        engine.add("a", A)
        with pytest.raises(InvalidRequestError, match="'a'"):
            engine.add("a", B)
        engine.abort("a")
        engine.add("a", B)

    def test_the_longest_that_fits_is_served(self):
        engine = Driver(num_blocks=6, max_model_len=21)
        engine.add("a", [1] * 20, max_tokens=None)
        engine.drain()
        assert len(engine.tokens("a")) == 1


class TestSeeds:
    def test_own_or_drawn_in_the_order_of_arrival(self):
        def seeds() -> list[int]:
            engine = Driver()
            engine.add("a", [1], seed=7)
            engine.add("b", [1])
            engine.add("c", [1])
            return [new.seed for new in engine.schedule().new_requests]

        first = seeds()
        assert first[0] == 7
        assert first[1] != first[2]
        assert first == seeds(), "the engine's seed decides"

    def test_the_same_after_a_preemption(self):
        engine = Driver(num_blocks=6, caching=False)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        seed = engine.schedule().new_requests[1].seed
        engine.update()
        resumed = []
        while engine.scheduler.has_unfinished:
            resumed += engine.schedule().new_requests
            engine.update()
        assert [new.seed for new in resumed] == [seed]


@pytest.mark.parametrize("form", [list, sent])
def test_a_thousand_tokens_arrive_as_sent(form):
    engine = Driver(num_blocks=300, budget=2000)
    prompt = [n % 50 for n in range(1, 998)]
    engine.add("a", form(prompt), max_tokens=1)
    (new,) = engine.schedule().new_requests
    assert (new.token_ids.tobytes(), new.num_prompt_tokens) == (sent(prompt), 997)
