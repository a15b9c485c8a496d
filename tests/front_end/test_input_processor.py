"""Prompts become requests; a wrong one is an error that names field, value and remedy."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import VOCAB_SIZE, make_model_folder

from ringcore import EngineConfig, SamplingParams
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import ConfigError, InvalidRequestError, UnknownOptionError
from ringcore.front_end.input_processor import InputProcessor
from ringcore.front_end.prompt_lists import as_prompt_list
from ringcore.front_end.tokenization.bad_words import bad_words_token_ids
from ringcore.front_end.tokenization.process import execute

MAX_MODEL_LEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


class LocalInputs:
    """An `InputProcessor` whose tokenizer is executed here."""

    def __init__(self, config, max_model_len=None):
        self.tokenizer = load_tokenizer(config.model.files)
        self.inputs = InputProcessor(config, self.tokenizer, max_model_len)

    def process(self, *args, **options):
        return self.finish(self.inputs.prepare(*args, **options))

    def process_chat(self, *args, **options):
        return self.finish(self.inputs.prepare_chat(*args, **options))

    def finish(self, preparation):
        job = preparation.job
        return preparation.finish(None if job is None else execute(self.tokenizer, job))


@pytest.fixture(scope="module")
def inputs(folder):
    return LocalInputs(EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=MAX_MODEL_LEN))


PARAMS = SamplingParams()


def test_text_is_encoded(inputs):
    prepared = inputs.process("Hi", PARAMS)
    assert prepared.prompt == "Hi"
    assert prepared.prompt_token_ids == [72, 105]
    assert prepared.requests[0].prompt_token_ids == np.array([72, 105], np.int32).tobytes()
    assert prepared.requests[0].num_prompt_tokens == 2
    assert prepared.requests[0].sampling_params is PARAMS


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), {"prompt_token_ids": [1, 2]}, [np.int64(1), np.int32(2)]])
def test_token_ids_are_taken_as_they_are(inputs, prompt):
    prepared = inputs.process(prompt, PARAMS)
    assert prepared.prompt is None
    assert prepared.prompt_token_ids == [1, 2]
    assert all(type(t) is int for t in prepared.prompt_token_ids)


def test_names_and_salts(inputs):
    prepared = inputs.process({"prompt": "a", "request_id": "mine", "cache_salt": "s"}, PARAMS)
    assert prepared.request_id == "mine"
    assert prepared.requests[0].cache_salt == "s"


@pytest.mark.parametrize(("given", "priority"), [({}, 0), ({"priority": None}, 0), ({"priority": np.int32(-3)}, -3)])
def test_priorities(inputs, given, priority):
    request = inputs.process({"prompt": "a"} | given, PARAMS).requests[0]
    assert (type(request.priority), request.priority) == (int, priority)


def test_the_engines_ids_are_unique_though_the_callers_are_not(inputs):
    prepared = [inputs.process({"prompt": "a", "request_id": name}, PARAMS) for name in ("x", "x", "x#1")]
    prepared += [inputs.process("a", PARAMS), inputs.process("a", PARAMS)]
    assert len({p.requests[0].request_id for p in prepared}) == 5
    assert len({p.request_id for p in prepared}) == 4


def test_arguments_go_before_what_the_dict_has(inputs):
    prompt = {"prompt": "a", "request_id": "dict", "cache_salt": "s", "priority": 3}
    same = inputs.process(prompt, PARAMS, request_id=None, priority=None, cache_salt=None)
    assert (same.request_id, same.requests[0].cache_salt, same.requests[0].priority) == ("dict", "s", 3)
    other = inputs.process(prompt, PARAMS, request_id="mine", priority=0, cache_salt="t")
    assert (other.request_id, other.requests[0].cache_salt, other.requests[0].priority) == ("mine", "t", 0)
    with pytest.raises(InvalidRequestError, match="priority"):
        inputs.process(prompt, PARAMS, priority="high")


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3)])
def test_a_request_of_each_completion(inputs, seed, seeds):
    prepared = inputs.process(
        {"prompt": "Hi", "request_id": "x", "priority": 2}, SamplingParams(n=3, seed=seed, top_k=4)
    )
    assert [one.sampling_params for one in prepared.requests] == [SamplingParams(seed=s, top_k=4) for s in seeds]
    assert len({one.request_id for one in prepared.requests}) == 3
    assert {(one.prompt_token_ids, one.priority, one.arrival_s) for one in prepared.requests} == {
        (np.array([72, 105], np.int32).tobytes(), 2, prepared.requests[0].arrival_s)
    }


def test_conversations(inputs):
    messages = [{"role": "user", "content": "hi"}]
    prepared = inputs.process_chat(messages, PARAMS, request_id="talk")
    assert (bytes(prepared.prompt_token_ids), prepared.request_id) == (b"user:hi;A:", "talk")
    bare = inputs.process_chat(messages, PARAMS, add_generation_prompt=False)
    assert bytes(bare.prompt_token_ids) == b"user:hi;"


@pytest.mark.parametrize("num_tokens", [1, MAX_MODEL_LEN - 1])
def test_lengths_that_fit(inputs, num_tokens):
    assert inputs.process([5] * num_tokens, PARAMS).requests[0].num_prompt_tokens == num_tokens


def test_a_context_length_that_the_engine_fitted(folder):
    config = EngineConfig.from_options(model=folder, load_format="dummy", max_model_len="auto")
    fitted = LocalInputs(config, max_model_len=8)
    fitted.process([5] * 7, PARAMS)
    with pytest.raises(InvalidRequestError, match="8 tokens and max_model_len is 8; shorten it to 7"):
        fitted.process([5] * 8, PARAMS)


@pytest.mark.parametrize(
    ("prompt", "field", "says"),
    [
        ("", "prompt", "empty"),
        ([], "prompt_token_ids", "empty"),
        ([5] * MAX_MODEL_LEN, "prompt", f"{MAX_MODEL_LEN} tokens.*shorten it to {MAX_MODEL_LEN - 1}"),
        ("x" * 99, "prompt", "99 tokens"),
        ([1, VOCAB_SIZE], "prompt_token_ids", f"{VOCAB_SIZE} at position 1 .* 0 to {VOCAB_SIZE - 1}"),
        ([-1], "prompt_token_ids", "-1 at position 0"),
        ([2**70], "prompt_token_ids", "not in the vocabulary"),
        ([1, 2.0], "prompt_token_ids", "2.0 at position 1 is a float"),
        ([True], "prompt_token_ids", "bool"),
        (["a"], "prompt_token_ids", "str"),
        (7, "prompt", "int"),
        (None, "prompt", "NoneType"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "no other"),
        ({}, "prompt", "give one of prompt, prompt_token_ids"),
        ({"prompt": 7}, "prompt", "int"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids", "str"),
        ({"prompt": "a", "request_id": 7}, "request_id", "7"),
        ({"prompt": "a", "request_id": ""}, "request_id", "empty"),
        ({"prompt": "a", "request_id": "x" * 257}, "request_id", "257 bytes"),
        ({"prompt": "a", "cache_salt": 1.5}, "cache_salt", "1.5"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt", "surrogate"),
        ({"prompt": "a", "priority": 0.5}, "priority", "give an integer from -2147483647 to 2147483647"),
        ({"prompt": "a", "priority": True}, "priority", "give an integer"),
        ({"prompt": "a", "priority": -(2**31)}, "priority", "-2147483648"),
        ("a\ud800", "prompt", "surrogate"),
    ],
)
def test_a_wrong_prompt(inputs, prompt, field, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        inputs.process(prompt, PARAMS)
    assert caught.value.details["field"] == field


def test_an_unknown_key_names_the_nearest(inputs):
    with pytest.raises(UnknownOptionError, match="did you mean 'prompt_token_ids'"):
        inputs.process({"prompt_tokens_ids": [1]}, PARAMS)


def test_stop_token_ids_are_of_the_vocabulary(inputs):
    inputs.process("a", SamplingParams(stop_token_ids=[VOCAB_SIZE - 1]))
    with pytest.raises(InvalidRequestError, match="stop_token_ids: token id 300 at position 1"):
        inputs.process("a", SamplingParams(stop_token_ids=[1, VOCAB_SIZE]))


def test_sampling_params_of_a_wrong_type(inputs):
    with pytest.raises(InvalidRequestError, match="give a SamplingParams"):
        inputs.process("a", {"temperature": 0})


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("abc", 1),
        ([1, 2, 3], 1),
        ({"prompt": "a"}, 1),
        (["a", "b"], 2),
        ([[1], [2, 3]], 2),
        ([[1], "a", {}], 3),
        ([], 0),
    ],
)
def test_what_is_one_prompt_and_what_are_many(prompts, count):
    assert len(as_prompt_list(prompts)) == count


def test_prompts_of_a_wrong_type():
    with pytest.raises(InvalidRequestError, match="prompts='int'"):
        as_prompt_list(7)


def test_the_first_completion_alone_tells_of_the_prompt(inputs):
    prepared = inputs.process("Hi", SamplingParams(n=3, prompt_logprobs=2))
    assert [one.sampling_params.prompt_logprobs for one in prepared.requests] == [2, None, None]


def test_bad_words_become_tokens_with_and_without_a_space(inputs):
    prepared = inputs.process("Hi", SamplingParams(bad_words=["no", " no", "x", " "], n=2))
    expected = [list(word) for word in (b"no", b" no", b"x", b" x", b" ")]
    assert [one.bad_words_token_ids for one in prepared.requests] == [expected, expected]
    assert inputs.process("Hi", PARAMS).requests[0].bad_words_token_ids == []


def test_a_word_without_tokens_is_an_error():
    with pytest.raises(InvalidRequestError, match="bad_words='no': the model's tokenizer returns no tokens"):
        bad_words_token_ids(["no"], lambda text: [])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {300: 1.0}}, "logit_bias: token id 300 at position 0"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids: token id 300 at position 1"),
        ({"allowed_token_ids": [120], "bad_words": ["x"]}, "allowed_token_ids=.120.: bad_words"),
        ({"allowed_token_ids": [256], "min_tokens": 1}, "stop tokens until min_tokens, mask all"),
        ({"logprobs": 21}, "logprobs=21: asks for 21 tokens, and max_logprobs is 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: asks for 300 tokens, and max_logprobs is 20"),
    ],
    ids=str,
)
def test_what_the_model_cannot_do(inputs, params, says):
    with pytest.raises(InvalidRequestError, match=says):
        inputs.process("Hi", SamplingParams(**params))


def test_log_probabilities_as_the_engine_bounds_them(folder):
    options = {"model": folder, "load_format": "dummy", "max_model_len": MAX_MODEL_LEN}
    every = LocalInputs(EngineConfig.from_options(**options, max_logprobs=-1))
    every.process("Hi", SamplingParams(logprobs=-1, prompt_logprobs=VOCAB_SIZE))
    none = LocalInputs(EngineConfig.from_options(**options, max_logprobs=0))
    none.process("Hi", SamplingParams(logprobs=0))
    with pytest.raises(InvalidRequestError, match="max_logprobs is 0"):
        none.process("Hi", SamplingParams(logprobs=1))
    for wrong in (-2, True, 2**31, "all"):
        with pytest.raises(ConfigError, match=f"max_logprobs={wrong!r}: give an integer"):
            EngineConfig.from_options(**options, max_logprobs=wrong)
