"""A request beside its columns: what it keeps when it loses its row, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.request import Request, RequestStatus


def request(num_prompt_tokens: int = 8, max_total_tokens: int = 12, **params) -> Request:
    wire = EngineCoreRequest("a", list(range(num_prompt_tokens)), SamplingParams(**params), arrival_s=0.5)
    tokens = np.arange(num_prompt_tokens, dtype=np.int32)
    return Request(
        wire,
        tokens,
        sequence=1,
        max_total_tokens=max_total_tokens,
        stop_token_ids=[70, 71],
        eos_token_ids=[70],
        seed=0,
    )


class TestPreemption:
    def preempted(self, num_total_tokens: int, max_total_tokens: int = 12) -> Request:
        one = request(max_total_tokens=max_total_tokens)
        one.start(row=3, run=7, num_cached_tokens=4, now_s=1.5)
        tokens = np.array([*range(8), 60], np.int32)
        one.preempt(tokens, num_total_tokens=num_total_tokens, num_computed_tokens=10, now_s=2.5)
        return one

    def test_keeps_the_known_tokens_and_waits_for_slots_for_all_that_it_had(self):
        one = self.preempted(num_total_tokens=11)  # 9 known, 2 in flight
        one.check()
        assert (one.status, one.row, one.num_preemptions) == (RequestStatus.PREEMPTED, None, 1)
        assert one.tokens.tolist() == [*range(8), 60]
        assert (one.num_prompt_tokens, one.num_tokens_to_hold) == (8, 11)
        assert one.waiting_since_s == 2.5

    def test_never_for_more_than_it_can_use(self):
        assert self.preempted(num_total_tokens=11, max_total_tokens=11).num_tokens_to_hold == 10, (
            "the last token of all is never computed"
        )

    def test_never_for_fewer_than_before(self):
        one = self.preempted(num_total_tokens=11)
        one.start(row=0, run=8, num_cached_tokens=0, now_s=3.0)
        one.preempt(one.tokens, num_total_tokens=9, num_computed_tokens=9, now_s=4.0)
        assert one.num_tokens_to_hold == 11

    def test_what_is_told_of_its_first_start_stays(self):
        one = self.preempted(num_total_tokens=9)
        one.start(row=0, run=8, num_cached_tokens=8, now_s=9.0)
        last = one.to_output([5], finish_reason="length")
        assert (last.first_scheduled_s, last.num_cached_tokens, last.num_preemptions) == (1.5, 4, 1)


def test_another_cache_may_be_smaller():
    one = request()
    one.num_tokens_to_hold = 11
    one.block_hashes.append(b"name in the old one")
    one.move_to_cache(10)
    one.check()
    assert (one.max_total_tokens, one.num_tokens_to_hold, one.block_hashes) == (10, 9, [])


class TestTheEnd:
    @pytest.mark.parametrize(
        ("token_id", "num_tokens", "ends"),
        [
            (5, 9, (None, None)),
            (70, 9, (None, None)),  # one token is generated, and min_tokens=2 bars the end
            (70, 10, ("stop", None)),  # the model's own end of text
            (71, 10, ("stop", 71)),
            (5, 12, ("length", None)),
            (71, 12, ("stop", 71)),
        ],
    )
    def test_by_a_token(self, token_id, num_tokens, ends):
        assert request(min_tokens=2).finish_reason(token_id, num_tokens) == ends

    def test_it_holds_nothing_then(self):
        one = request()
        one.start(row=3, run=7, num_cached_tokens=0, now_s=1.5)
        one.finish()
        assert (one.status, one.row) == (RequestStatus.FINISHED, None)


def test_check_notices_a_row_that_is_kept():
    one = request()
    one.row = 1
    with pytest.raises(AssertionError, match="holds a row"):
        one.check()
