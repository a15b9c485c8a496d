"""What requests say about tokens, against a vocabulary of 50 whose end of text is 0."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import num_examples
from scheduler_driver import Driver

from ringcore.errors import InvalidRequestError
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.vocabulary import MAX_PROMPT_LOGPROBS, Vocabulary

SIZE = 50


def vocabulary(max_logprobs: int = 20) -> Vocabulary:
    return Vocabulary(SIZE, [0], max_logprobs)


@pytest.mark.parametrize(
    ("params", "bad_words"),
    [
        ({}, []),
        ({"logprobs": 20, "prompt_logprobs": 20}, []),
        ({"logit_bias": {0: 1, 49: -1}}, []),
        ({"allowed_token_ids": [49, 49]}, [[48], [49, 49]]),
        ({"allowed_token_ids": [0, 5], "min_tokens": 3}, []),
        ({"allowed_token_ids": [0], "min_tokens": 3, "ignore_eos": True}, []),
        ({"bad_words": ["x"]}, [[7], [8, 9]]),
        ({}, [[token] for token in range(49)]),
    ],
    ids=str,
)
def test_what_can_be_done(params, bad_words):
    vocabulary().check(SamplingParams(**params), bad_words, 10)


@pytest.mark.parametrize(
    ("params", "bad_words", "says"),
    [
        ({"logprobs": 21}, [], "logprobs=21: asks for 21 tokens, and max_logprobs is 20; give fewer, or raise"),
        ({"prompt_logprobs": -1}, [], "prompt_logprobs=-1: asks for 50 tokens, and max_logprobs is 20"),
        ({"logit_bias": {4: 1, 50: 1}}, [], "logit_bias: token id 50 at position 1 is not in the vocabulary"),
        ({"allowed_token_ids": [50]}, [], "allowed_token_ids: token id 50 at position 0"),
        ({"bad_words": ["x"]}, [], "bad_words=.'x'.: give their token ids too, as bad_words_token_ids"),
        ({}, [[1], [50]], "bad_words_token_ids: token id 50 at position 0"),
        ({}, [[1], [-1]], "bad_words_token_ids: token id -1 at position 0"),
        ({}, [[1], []], "bad_words_token_ids=.*: give lists of 1 to"),
        ({}, [[1]] * 129, "bad_words_token_ids=.*: give a list of at most 128"),
        ({}, [5], "bad_words_token_ids=5: give lists"),
        ({}, [[1.5]], "bad_words_token_ids: token id 1.5 at position 0"),
        ({}, [[t] for t in range(50)], "bad_words=50: no token of the vocabulary is left"),
        ({"allowed_token_ids": [3, 4]}, [[3], [4]], "allowed_token_ids=.3, 4.: bad_words, or the stop tokens"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, [], "allowed_token_ids=.0.: bad_words, or the stop tokens"),
        ({"allowed_token_ids": [3, 9], "min_tokens": 1, "stop_token_ids": [9]}, [[3]], "mask all of them"),
    ],
    ids=str,
)
def test_what_cannot(params, bad_words, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        vocabulary().check(SamplingParams(**params), bad_words, 10)
    assert caught.value.details["field"] in {*params, "bad_words", "bad_words_token_ids"}


def test_log_probabilities_of_all():
    vocabulary(-1).check(SamplingParams(logprobs=-1, prompt_logprobs=50), [], 10)
    vocabulary(50).check(SamplingParams(logprobs=-1), [], 10)
    with pytest.raises(InvalidRequestError, match="asks for 51 tokens, and max_logprobs is 50"):
        vocabulary(-1).check(SamplingParams(logprobs=51), [], 10)
    with pytest.raises(InvalidRequestError, match="the vocabulary has 50 tokens; give at most so many, or -1 for all"):
        vocabulary(100).check(SamplingParams(logprobs=51), [], 10)


def test_a_prompt_is_not_told_of_beyond_all_bounds():
    large, most = Vocabulary(150_000, [], -1), MAX_PROMPT_LOGPROBS // 150_001
    large.check(SamplingParams(prompt_logprobs=-1), [], most + 1)
    with pytest.raises(InvalidRequestError, match=r"prompt_logprobs=-1: for a prompt of .* tokens these are") as caught:
        large.check(SamplingParams(prompt_logprobs=-1), [], most + 2)
    fits = int(caught.value.message.split("give at most ")[1].split(",")[0])
    large.check(SamplingParams(prompt_logprobs=fits), [], most + 2)
    with pytest.raises(InvalidRequestError):
        large.check(SamplingParams(prompt_logprobs=fits + 1), [], most + 2)
    large.check(SamplingParams(prompt_logprobs=-1), [], 1)


IDS = st.lists(st.integers(-2, 52) | st.sampled_from([2**31, 2**63, 1.0, None, "a", True]), max_size=4)


@settings(max_examples=num_examples(100, 300), deadline=None)
@given(prompt=IDS, bad_words=st.lists(IDS, max_size=3) | st.sampled_from([5, None, ["ab"], [b"ab"]]))
def test_no_id_of_another_vocabulary_gets_in(prompt, bad_words):
    engine = Driver(num_blocks=9)
    request = EngineCoreRequest("a", prompt, SamplingParams(), arrival_s=0.0, bad_words_token_ids=bad_words)
    try:
        engine.scheduler.add_request(request)
    except InvalidRequestError as error:
        field = error.details["field"]
    else:
        field = None
    if field is not None:
        assert field in ("prompt_token_ids", "bad_words_token_ids")
        assert not engine.scheduler.has_unfinished
        return
    (new,) = engine.schedule().new_requests
    assert all(0 <= token < SIZE for token in new.token_ids.tolist())
    assert all(sequence and all(0 <= token < SIZE for token in sequence) for sequence in new.bad_words_token_ids or ())
