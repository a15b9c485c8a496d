"""A request's counts through its states."""

from __future__ import annotations

from array import array

import pytest

from ringcore.protocol import EngineCoreRequest
from ringcore.sampling_params import SamplingParams
from ringcore.scheduler.request import Request, RequestStatus


def request(num_prompt_tokens: int = 8, max_total_tokens: int = 12) -> Request:
    wire = EngineCoreRequest("a", list(range(num_prompt_tokens)), SamplingParams(), arrival_s=0.0)
    tokens = array("i", range(num_prompt_tokens))
    return Request(wire, tokens, max_total_tokens=max_total_tokens, stop_token_ids=[], seed=0)


def test_what_is_left_to_compute():
    one = request()
    one.start(row=3, num_cached_tokens=4, now_s=1.5)
    assert (one.status, one.num_tokens_to_compute) == (RequestStatus.RUNNING, 4)
    one.num_computed_tokens = 8
    assert one.num_tokens_to_compute == 0
    one.num_pending = 1
    assert (one.num_total_tokens, one.num_tokens_to_compute) == (9, 1)
    one.num_computed_tokens, one.num_pending = 11, 4
    assert one.num_tokens_to_compute == 0, "the tokens in flight are the last it can have"
    one.check()


def test_preemption_keeps_the_tokens_and_voids_what_is_in_flight():
    one = request()
    one.start(row=3, num_cached_tokens=4, now_s=1.5)
    one.tokens.append(70)
    one.num_computed_tokens, one.num_confirmed_tokens, one.num_pending = 10, 9, 2
    epoch = one.epoch
    one.preempt(2.5)
    one.check()
    assert (one.status, one.row, one.num_preemptions) == (RequestStatus.PREEMPTED, None, 1)
    assert one.epoch != epoch
    assert (one.num_computed_tokens, one.num_pending, one.num_generated_tokens) == (0, 0, 1)
    assert one.num_tokens_to_hold == 11
    one.start(row=0, num_cached_tokens=8, now_s=9.0)
    assert (one.first_scheduled_s, one.num_cached_tokens) == (1.5, 4), "as it was when it first ran"


def test_a_preempted_request_never_waits_for_more_slots_than_it_can_use():
    one = request(max_total_tokens=10)
    one.start(row=0, num_cached_tokens=0, now_s=0.0)
    one.num_computed_tokens, one.num_pending = 9, 2
    one.preempt(2.5)
    assert one.num_tokens_to_hold == 9


def test_what_the_workers_are_told_is_a_copy():
    one = request()
    one.start(row=2, num_cached_tokens=0, now_s=0.0)
    told = one.to_new_request()
    one.tokens.append(70)  # a view would forbid it
    assert told.token_ids.tolist() == list(range(8))
    assert (told.row, told.num_prompt_tokens, told.num_computed_tokens) == (2, 8, 0)


def test_check_notices_a_row_that_is_kept():
    one = request()
    one.row = 1
    with pytest.raises(AssertionError, match="holds a row"):
        one.check()
