"""Tools and reasoning in /v1/chat/completions, called by the official client, streaming and not."""

from __future__ import annotations

import json

import openai
import pytest
from chat_answers import (
    ARGUMENTS,
    BROKEN,
    CALL,
    LLAMA_CALL,
    TIME,
    TIME_CALL,
    WEATHER,
    ask,
    ask_all,
    client_of,
    streaming,
)
from echo_model import HERMES_MARKS, LLAMA_MARKS, serve_echo
from engine_spy import seen_requests


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    plain = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # as in Qwen's tokenizers
    with serve_echo(tmp_path_factory.mktemp("hermes"), HERMES_MARKS, ("<|pad|>",), plain) as running:
        yield running


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with serve_echo(
        tmp_path_factory.mktemp("llama"), LLAMA_MARKS, ("<|python_tag|>", "<|pad|>", "<think>", "</think>")
    ) as running:
        yield running


@streaming
def test_calls_in_tags(hermes, stream):
    got = ask(hermes, f"Let me look.\n{CALL}\n{TIME_CALL}", stream=stream, tools=[WEATHER, TIME])
    assert got.content == "Let me look."
    assert got.read_calls == [("get_weather", ARGUMENTS), ("get_time", {})]
    assert got.finish_reason == "tool_calls"
    assert len(set(got.ids)) == 2
    assert all(call_id.startswith("call_") for call_id in got.ids)


@streaming
def test_a_message_of_a_call_alone_has_no_content(hermes, stream):
    got = ask(hermes, CALL, stream=stream, tools=[WEATHER], tool_choice="auto")
    assert (got.content, got.read_calls) == (None, [("get_weather", ARGUMENTS)])


def test_arguments_stream_in_pieces(hermes):
    with client_of(hermes) as client:
        chunks = client.chat.completions.create(
            model=hermes.service.model_names[0],
            messages=[{"role": "user", "content": CALL + "x" * 300}],
            tools=[WEATHER],
            stream=True,
        )
        deltas = [c.choices[0].delta for c in chunks]
    first, *rest = [call for delta in deltas for call in delta.tool_calls or []]
    assert (first.index, first.function.name, first.function.arguments) == (0, "get_weather", "")
    assert json.loads("".join(call.function.arguments for call in rest)) == ARGUMENTS
    assert all("tool_call>" not in (delta.content or "") for delta in deltas)


@streaming
@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        "<tool_call>\nget_weather(Paris)\n</tool_call>",
        '{"name": "get_weather", "arguments": {}}',  # without its tags
    ],
)
def test_what_is_no_call_is_content(hermes, stream, said):
    got = ask(hermes, said, stream=stream, tools=[WEATHER])
    assert (got.content, got.calls, got.finish_reason) == (said, [], "stop")


def test_a_call_that_breaks_off_is_content(hermes):
    got = ask(hermes, BROKEN, tools=[WEATHER])
    assert (got.content, got.calls, got.finish_reason) == (BROKEN, [], "stop")


def test_a_call_that_breaks_off_in_a_stream_is_content_too(hermes):
    got = ask(hermes, BROKEN + CALL, stream=True, tools=[WEATHER])
    assert got.content == BROKEN
    assert got.calls[0][0] == "get_weather"
    assert json.loads(got.calls[1][1]) == ARGUMENTS
    assert got.finish_reason == "stop"  # not all of these calls can be made


@streaming
def test_a_call_that_is_cut_short(hermes, stream):
    got = ask(hermes, CALL, stream=stream, tools=[WEATHER], max_tokens=60)
    assert got.content.startswith('<tool_call>\n{"name": "get_weather"')
    assert got.finish_reason == "length"
    assert len(got.calls) == int(stream)


@streaming
def test_what_is_cut_short_behind_a_call(hermes, stream):
    got = ask(hermes, CALL + "x" * 200, stream=stream, tools=[WEATHER], max_tokens=len(CALL))
    assert (got.read_calls, set(got.content), got.finish_reason) == ([("get_weather", ARGUMENTS)], {"x"}, "length")


@streaming
@pytest.mark.parametrize("options", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(hermes, stream, options):
    got = ask(hermes, CALL, stream=stream, **options)
    assert (got.content, got.calls, got.finish_reason) == (CALL, [], "stop")


@streaming
def test_one_call_where_they_are_not_to_be_parallel(hermes, stream):
    got = ask(hermes, f"{CALL}\n{TIME_CALL}", stream=stream, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert (got.read_calls, got.finish_reason) == ([("get_weather", ARGUMENTS)], "tool_calls")


@streaming
def test_each_choice_is_parsed_alone(hermes, stream):
    said = f"<think>{CALL}</think>{CALL}||no <tool_call>||{TIME_CALL}"
    got = ask_all(hermes, said, stream=stream, tools=[WEATHER, TIME], n=3, seed=0)
    assert [one.read_calls for one in got] == [[("get_weather", ARGUMENTS)], [], [("get_time", {})]]
    assert [one.finish_reason for one in got] == ["tool_calls", "stop", "tool_calls"]
    assert [one.content for one in got] == [None, "no <tool_call>", None]
    assert got[0].reasoning == CALL
    assert got[0].ids != got[2].ids


@streaming
def test_reasoning(hermes, stream):
    got = ask(hermes, "<think>\nLet me see.\n</think>\n\nIt is 4.", stream=stream)
    assert (got.reasoning, got.content, got.finish_reason) == ("Let me see.", "It is 4.", "stop")


@streaming
@pytest.mark.parametrize(
    ("thinking", "said", "reasoning", "content"),
    [(True, "hm</think>yes", "hm", "yes"), (False, "<think>yes", "", "<think>yes")],
)
def test_reasoning_that_the_template_opens_or_closes(hermes, stream, thinking, said, reasoning, content):
    extra = {"chat_template_kwargs": {"thinking": thinking}}
    got = ask(hermes, said, stream=stream, extra_body=extra)
    assert (got.reasoning, got.content) == (reasoning, content)


@streaming
def test_logprobs_of_all_tokens(hermes, stream):
    said = f"<think>a</think>b{CALL}".replace("ü", "u")
    got = ask(hermes, said, stream=stream, tools=[WEATHER], logprobs=True)
    assert "".join(got.tokens).startswith(said)


@streaming
def test_a_stop_string_ends_it(hermes, stream):
    got = ask(hermes, CALL + " and more", stream=stream, tools=[WEATHER], stop=["</tool_call>"])
    assert (got.read_calls, got.finish_reason) == ([("get_weather", ARGUMENTS)], "tool_calls")
    assert got.content is None


@streaming
@pytest.mark.parametrize("said", [LLAMA_CALL, "<|python_tag|>" + LLAMA_CALL, "<|pad|>" + LLAMA_CALL])
def test_bare_calls_and_special_markers(llama, stream, said):
    got = ask(llama, said, stream=stream, tools=[WEATHER], stop=["|>?"])
    assert (got.content, got.read_calls, got.finish_reason) == (None, [("get_weather", ARGUMENTS)], "tool_calls")


@streaming
def test_a_special_marker_within_a_text(llama, stream):
    got = ask(llama, "Let me look.<|python_tag|>" + LLAMA_CALL, stream=stream, tools=[WEATHER])
    assert (got.content, got.read_calls) == ("Let me look.", [("get_weather", ARGUMENTS)])
    got = ask(llama, "a<|python_tag|>b", stream=stream)
    assert got.content == "ab"  # without tools it is a special token like any other


@streaming
def test_special_markers_of_reasoning(llama, stream):
    got = ask(llama, "<think>hm</think>yes", stream=stream)
    assert (got.reasoning, got.content) == ("hm", "yes")
    got = ask(llama, "hm</think>yes", stream=stream, extra_body={"chat_template_kwargs": {"thinking": True}})
    assert (got.reasoning, got.content) == ("hm", "yes")


@streaming
@pytest.mark.parametrize(("skip", "content"), [(None, "a < b <|c"), (False, "a <|pad|>< b <|pad|><|c")])
def test_other_special_tokens_are_left_out_unless_asked_for(llama, stream, skip, content):
    extra = {} if skip is None else {"skip_special_tokens": skip}
    got = ask(llama, "a <|pad|>< b <|pad|><|c", stream=stream, tools=[WEATHER], stop=["|>?"], extra_body=extra)
    assert got.content == content


@pytest.mark.long_form
def test_parsers_that_are_switched_off(tmp_path):
    with serve_echo(tmp_path, HERMES_MARKS, tool_call_parser=None, reasoning_parser=None) as service:
        got = ask(service, "<think>a</think>b")
        assert (got.content, got.reasoning) == ("<think>a</think>b", "")
        with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
            ask(service, CALL, tools=[WEATHER])
        # A forced call needs no format of the model's: it is JSON alone, which the grammar demands.
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            with seen_requests(service) as seen:
                got = ask(service, LLAMA_CALL, tools=[WEATHER, TIME], tool_choice=choice)
            assert (got.read_calls, got.content) == ([("get_weather", ARGUMENTS)], None)
            grammar = seen[0].sampling_params.structured_outputs.grammar
            assert ("get_time" in grammar) == (choice == "required")
