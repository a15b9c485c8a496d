"""Engine outputs become request outputs: tokens, text, reasons, log-probabilities, errors."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import EOS, make_model_folder

from ringcore import SamplingParams
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import InvalidRequestError, error_to_wire
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.output_processor import OutputProcessor
from ringcore.params.outputs import Logprob
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, PromptLogprobs, TokenLogprobs, WireError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


def add(processor, request_id="a#0", prompt="Hi", kind="final", num_completions=1, **params):
    names = [request_id] if num_completions == 1 else [f"{request_id}.{i}" for i in range(num_completions)]
    token_ids = list(prompt.encode())
    requests = [EngineCoreRequest(name, token_ids, SamplingParams(**params), arrival_s=1.0) for name in names]
    return processor.add(PreparedRequest(requests, request_id.split("#")[0], prompt, token_ids), kind)


def finished(processed):
    """What ended, by the caller's request id."""
    return {state.request_id: state.take_last() for state in processed.changed if state.is_over}


def chunk(text, request_id="a#0", **fields):
    ids = list(text.encode()) if isinstance(text, str) else text
    return EngineCoreOutput(request_id, ids, **fields)


def test_a_completion_by_length(processor):
    add(processor)
    assert finished(processor.process([chunk("a")])) == {}
    processed = processor.process(
        [chunk("b", finish_reason="length", num_cached_tokens=16, first_scheduled_s=1.5, num_preemptions=2)]
    )
    output = finished(processed)["a"]
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
    assert finished(processed)["b"].outputs[0].text == "yz"
    assert processor.unfinished_ids == ["a#0"]


def test_a_stop_string_ends_it_and_the_engine_is_to_be_told(processor):
    add(processor, stop=["END"])
    assert processor.process([chunk("x E")]).abort_ids == []
    processed = processor.process([chunk("NDxyz")])
    completion = finished(processed)["a"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("x ", "stop", "END")
    assert bytes(completion.token_ids) == b"x END"  # up to the token that completed it
    assert processed.abort_ids == ["a#0"]
    assert processed.num_new_tokens == 2


def test_late_outputs_are_dropped(processor):
    add(processor, stop=["."])
    processor.process([chunk(".")])
    late = processor.process([chunk("late"), chunk("", finish_reason="abort"), chunk("x", "stranger#9")])
    assert late.changed == []
    assert late.abort_ids == []
    assert late.num_new_tokens == 0


def test_a_stop_string_in_the_engines_last_output_needs_no_abort(processor):
    add(processor, stop=["."])
    processed = processor.process([chunk("ab.", finish_reason="length")])
    completion = finished(processed)["a"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", ".")
    assert processed.abort_ids == []


def test_the_stop_string_may_be_kept(processor):
    add(processor, stop=["."], include_stop_str_in_output=True)
    assert finished(processor.process([chunk("ab.c")]))["a"].outputs[0].text == "ab."


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(processor):
    add(processor, stop=["END"])
    output = finished(processor.process([chunk("xEN", finish_reason="length")]))["a"]
    assert output.outputs[0].text == "xEN"
    assert output.outputs[0].finish_reason == "length"


def test_end_of_text_is_a_token_without_text(processor):
    add(processor, skip_special_tokens=False)
    completion = finished(processor.process([chunk([97, EOS], finish_reason="stop")]))["a"].outputs[0]
    assert (completion.text, completion.token_ids) == ("a", [97, EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_of_the_user(processor):
    add(processor, stop_token_ids=[98])
    completion = finished(processor.process([chunk("ab", finish_reason="stop", stop_reason=98)]))["a"].outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("a", [97, 98], 98)


def test_log_probabilities(processor):
    add(processor, logprobs=2, stop=["c"])
    rows = [
        TokenLogprobs([97, 97, 98], [-0.5, -0.5, -2.0], [1, 1, 2]),
        TokenLogprobs([98, 99, 0xE2], [-3.0, -0.25, -1.0], [7, 1, 2]),
        TokenLogprobs([99], [-1.0], [1]),
        TokenLogprobs([100], [-1.0], [1]),
    ]
    completion = finished(processor.process([chunk("abcd", logprobs=rows)]))["a"].outputs[0]
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
    output = finished(processor.process([chunk("", finish_reason="error", error=refusal())]))["a"]
    assert isinstance(output.error, InvalidRequestError)
    assert output.error.details == {"field": "prompt", "value": 9}
    assert output.outputs == []
    assert output.finished


def test_a_request_that_fails_half_way_keeps_what_it_has(processor):
    add(processor, stop=["b"])
    processor.process([chunk("a")])
    output = finished(processor.process([chunk("", finish_reason="error", error=refusal())]))["a"]
    assert output.outputs[0].text == "a"
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(output.error, InvalidRequestError)


def test_an_aborted_request(processor):
    add(processor)
    processor.process([chunk("a")])
    completion = finished(processor.process([chunk("", finish_reason="abort")]))["a"].outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "abort")


def test_forgotten_requests_put_nothing_out(processor):
    add(processor)
    processor.forget(["a#0", "unknown"])
    assert finished(processor.process([chunk("x", finish_reason="length")])) == {}


def texts(output):
    return [one.text for one in output.outputs]


def test_nothing_new_nothing_to_take(processor):
    state = add(processor, kind="cumulative")
    assert state.take() is None
    assert processor.process([chunk("a")]).changed == [state]
    assert texts(state.take()) == ["a"]
    assert state.take() is None


def test_cumulative_outputs_are_the_readers_own(processor):
    state = add(processor, kind="cumulative", logprobs=0)
    outputs = []
    for letter in "abc":
        row = TokenLogprobs([ord(letter)], [-1.0], [1])
        processor.process([chunk(letter, logprobs=[row], finish_reason="length" if letter == "c" else None)])
        outputs.append(state.take())
        outputs[-1].outputs[0].token_ids.append(0)
        outputs[-1].outputs[0].logprobs.clear()
    assert [texts(output) for output in outputs] == [["a"], ["ab"], ["abc"]]
    assert [output.outputs[0].token_ids for output in outputs] == [[97, 0], [97, 98, 0], [97, 98, 99, 0]]
    assert [output.outputs[0].cumulative_logprob for output in outputs] == [-1.0, -2.0, -3.0]
    assert [output.finished for output in outputs] == [False, False, True]


def test_deltas_that_nobody_took_are_merged(processor):
    state = add(processor, kind="delta", stop=["END"])
    processor.process([chunk("ab")])
    processor.process([chunk("c E")])
    first = state.take().outputs[0]
    assert (first.text, bytes(first.token_ids)) == ("abc ", b"abc E")
    processor.process([chunk("N")])
    processor.process([chunk("x", finish_reason="length")])
    second = state.take().outputs[0]
    assert (second.text, bytes(second.token_ids), second.finish_reason) == ("ENx", b"Nx", "length")
    assert state.take() is None


def test_a_final_output_alone(processor):
    state = add(processor, kind="final")
    assert processor.process([chunk("a")]).changed == []
    assert state.take() is None
    assert processor.process([chunk("b", finish_reason="length")]).changed == [state]
    assert texts(state.take()) == ["ab"]


def test_several_completions_are_one_request(processor):
    state = add(processor, kind="delta", num_completions=2, stop=["."])
    both = [chunk("a", "a#0.0", num_cached_tokens=8, first_scheduled_s=3.0), chunk("b", "a#0.1", first_scheduled_s=2.0)]
    assert processor.process(both).changed == [state]
    output = state.take()
    assert (texts(output), output.num_cached_tokens, output.metrics.first_scheduled_s) == (["a", "b"], 8, 2.0)
    processed = processor.process([chunk("x", "a#0.0", num_preemptions=1), chunk("y.", "a#0.1", num_preemptions=2)])
    assert processed.abort_ids == ["a#0.1"]
    output = state.take()
    assert [one.finish_reason for one in output.outputs] == [None, "stop"]
    assert not output.finished
    assert output.metrics.finished_s is None
    processor.process([chunk("late", "a#0.1"), chunk("z", "a#0.0", finish_reason="length", num_preemptions=1)])
    output = state.take()
    assert texts(output) == ["z", ""]
    assert [one.finish_reason for one in output.outputs] == ["length", "stop"]
    assert output.finished
    assert output.metrics.num_preemptions == 3
    assert not processor.has_unfinished


def test_an_error_of_one_completion_ends_the_others(processor):
    state = add(processor, kind="cumulative", num_completions=3)
    processor.process([chunk("a", "a#0.0"), chunk("b", "a#0.2", finish_reason="length")])
    processed = processor.process([chunk("", "a#0.1", finish_reason="error", error=refusal()), chunk("c", "a#0.0")])
    assert processed.abort_ids == ["a#0.0"]
    output = state.take()
    assert isinstance(output.error, InvalidRequestError)
    assert [one.finish_reason for one in output.outputs] == ["abort", "error", "length"]
    assert texts(output) == ["a", "", "b"]
    assert not processor.has_unfinished


def test_a_request_that_is_ended_here(processor):
    state = add(processor, kind="cumulative", num_completions=2)
    processor.process([chunk("a", "a#0.0", finish_reason="length")])
    state.take()
    assert state.unfinished_ids == ["a#0.1"]
    state.end(9.0)
    output = state.take()
    assert [one.finish_reason for one in output.outputs] == ["length", "abort"]
    assert output.metrics.finished_s == 9.0
    assert processor.process([chunk("late", "a#0.1")]).changed == []
    state.end(10.0)
    assert state.take() is None


def prompt_columns(count, token_ids):
    logprobs = np.array([-1.0] * len(token_ids), np.float32)
    return PromptLogprobs(0, count, int_array(token_ids), logprobs, int_array(range(1, 1 + len(token_ids))))


HIM = [  # of the prompt "Him": its own token and one more at each position but the first
    None,
    {105: Logprob(-1.0, 1, "i"), 97: Logprob(-1.0, 2, "a")},
    {109: Logprob(-1.0, 4, "m")},
]


@pytest.mark.parametrize(
    ("kind", "expected"), [("cumulative", [HIM, HIM]), ("delta", [HIM, None]), ("final", [None, HIM])]
)
def test_prompt_logprobs_by_token_of_the_prompt(processor, kind, expected):
    state = add(processor, prompt="Him", kind=kind, num_completions=2, prompt_logprobs=1)
    told = prompt_columns(1, [105, 97, 109, 109])
    processor.process([chunk("a", "a#0.0", prompt_logprobs=told), chunk("a", "a#0.1")])
    first = state.take()
    processor.process([chunk("b", f"a#0.{i}", finish_reason="length") for i in range(2)])
    assert [output and output.prompt_logprobs for output in (first, state.take())] == expected


def test_a_readers_list_of_a_prompt_is_its_own(processor):
    state = add(processor, prompt="Him", kind="cumulative", prompt_logprobs=1)
    processor.process([chunk("a", prompt_logprobs=prompt_columns(1, [105, 97, 109, 109]))])
    state.take().prompt_logprobs.clear()
    processor.process([chunk("b")])
    assert state.take().prompt_logprobs == HIM


def test_a_lone_token_follows_nothing(processor):
    add(processor, prompt="H", prompt_logprobs=5)
    add(processor, "b#1", prompt="H")
    done = [chunk("a", name, finish_reason="length") for name in ("a#0", "b#1")]
    outputs = finished(processor.process(done))
    assert outputs["a"].prompt_logprobs == [None]
    assert outputs["b"].prompt_logprobs is None
