"""Engine outputs become request outputs: tokens, text, reasons, log-probabilities, errors."""

from __future__ import annotations

import pytest
from fake_engine import EOS, make_model_folder

from ringcore import SamplingParams
from ringcore.engine_core.output_processor import OutputProcessor
from ringcore.errors import InvalidRequestError, error_to_wire
from ringcore.outputs import Logprob
from ringcore.protocol import EngineCoreOutput, EngineCoreRequest, TokenLogprobs, WireError
from ringcore.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


def add(processor, request_id="a#0", prompt="Hi", **params):
    request = EngineCoreRequest(request_id, list(prompt.encode()), SamplingParams(**params), arrival_s=1.0)
    processor.add_request(request, request_id=request_id.split("#")[0], prompt=prompt)


def chunk(text, request_id="a#0", **fields):
    ids = list(text.encode()) if isinstance(text, str) else text
    return EngineCoreOutput(request_id, ids, **fields)


def test_a_completion_by_length(processor):
    add(processor)
    assert processor.process([chunk("a")]).finished == {}
    processed = processor.process(
        [chunk("b", finish_reason="length", num_cached_tokens=16, first_scheduled_s=1.5, num_preemptions=2)]
    )
    output = processed.finished["a#0"]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", "Hi", [72, 105])
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", [97, 98])
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    assert output.num_cached_tokens == 16
    metrics = output.metrics
    assert (metrics.arrival_s, metrics.first_scheduled_s, metrics.num_preemptions) == (1.0, 1.5, 2)
    assert metrics.first_token_s <= metrics.finished_s
    assert output.finished
    assert processed.abort_ids == []
    assert not processor.has_unfinished


def test_requests_do_not_mix(processor):
    add(processor, "a#0")
    add(processor, "b#1")
    processor.process([chunk("x", "a#0"), chunk("y", "b#1")])
    processed = processor.process([chunk("z", "b#1", finish_reason="length")])
    assert processed.finished["b#1"].outputs[0].text == "yz"
    assert processor.unfinished_ids == ["a#0"]


def test_a_stop_string_ends_it_and_the_engine_is_to_be_told(processor):
    add(processor, stop=["END"])
    assert processor.process([chunk("x E")]).abort_ids == []
    processed = processor.process([chunk("NDxyz")])
    completion = processed.finished["a#0"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("x ", "stop", "END")
    assert bytes(completion.token_ids) == b"x END"  # up to the token that completed it
    assert processed.abort_ids == ["a#0"]
    assert processed.num_new_tokens == 2


def test_late_outputs_are_dropped(processor):
    add(processor, stop=["."])
    processor.process([chunk(".")])
    late = processor.process([chunk("late"), chunk("", finish_reason="abort"), chunk("x", "stranger#9")])
    assert late.finished == {}
    assert late.abort_ids == []
    assert late.num_new_tokens == 0


def test_a_stop_string_in_the_engines_last_output_needs_no_abort(processor):
    add(processor, stop=["."])
    processed = processor.process([chunk("ab.", finish_reason="length")])
    completion = processed.finished["a#0"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", ".")
    assert processed.abort_ids == []


def test_the_stop_string_may_be_kept(processor):
    add(processor, stop=["."], include_stop_str_in_output=True)
    assert processor.process([chunk("ab.c")]).finished["a#0"].outputs[0].text == "ab."


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(processor):
    add(processor, stop=["END"])
    output = processor.process([chunk("xEN", finish_reason="length")]).finished["a#0"]
    assert output.outputs[0].text == "xEN"
    assert output.outputs[0].finish_reason == "length"


def test_end_of_text_is_a_token_without_text(processor):
    add(processor, skip_special_tokens=False)
    completion = processor.process([chunk([97, EOS], finish_reason="stop")]).finished["a#0"].outputs[0]
    assert (completion.text, completion.token_ids) == ("a", [97, EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_of_the_user(processor):
    add(processor, stop_token_ids=[98])
    completion = processor.process([chunk("ab", finish_reason="stop", stop_reason=98)]).finished["a#0"].outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("a", [97, 98], 98)


def test_log_probabilities(processor):
    add(processor, logprobs=2, stop=["c"])
    rows = [
        TokenLogprobs([97, 97, 98], [-0.5, -0.5, -2.0], [1, 1, 2]),
        TokenLogprobs([98, 99, 0xE2], [-3.0, -0.25, -1.0], [7, 1, 2]),
        TokenLogprobs([99], [-1.0], [1]),
        TokenLogprobs([100], [-1.0], [1]),
    ]
    completion = processor.process([chunk("abcd", logprobs=rows)]).finished["a#0"].outputs[0]
    assert completion.logprobs == [
        {97: Logprob(-0.5, 1, "a"), 98: Logprob(-2.0, 2, "b")},
        {98: Logprob(-3.0, 7, "b"), 99: Logprob(-0.25, 1, "c"), 0xE2: Logprob(-1.0, 2, "\ufffd")},
        {99: Logprob(-1.0, 1, "c")},
    ]
    assert completion.cumulative_logprob == -4.5
    assert len(completion.token_ids) == len(completion.logprobs)


def refusal():
    return WireError(**error_to_wire(InvalidRequestError("too long", field="prompt", value=9)))


def test_a_refused_request_has_an_error_and_no_completion(processor):
    add(processor)
    output = processor.process([chunk("", finish_reason="error", error=refusal())]).finished["a#0"]
    assert isinstance(output.error, InvalidRequestError)
    assert output.error.details == {"field": "prompt", "value": 9}
    assert output.outputs == []
    assert output.finished


def test_a_request_that_fails_half_way_keeps_what_it_has(processor):
    add(processor, stop=["b"])
    processor.process([chunk("a")])
    output = processor.process([chunk("", finish_reason="error", error=refusal())]).finished["a#0"]
    assert output.outputs[0].text == "a"
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(output.error, InvalidRequestError)


def test_an_aborted_request(processor):
    add(processor)
    processor.process([chunk("a")])
    completion = processor.process([chunk("", finish_reason="abort")]).finished["a#0"].outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "abort")


def test_forgotten_requests_put_nothing_out(processor):
    add(processor)
    processor.forget(["a#0", "unknown"])
    assert processor.process([chunk("x", finish_reason="length")]).finished == {}
