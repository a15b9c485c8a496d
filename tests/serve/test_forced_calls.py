"""Calls that a request forces, and answers in JSON, by the official client; the model says what the grammar takes."""

from __future__ import annotations

import json

import openai
import pytest
from chat_answers import ARGUMENTS, CALL, LLAMA_CALL, TIME, TIME_CALL, WEATHER, ask, client_of, streaming
from echo_model import HERMES_MARKS, LLAMA_MARKS, serve_echo
from engine_spy import seen_requests
from pydantic import BaseModel
from running_service import http

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    plain = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # as in Qwen3's tokenizer
    with serve_echo(tmp_path_factory.mktemp("qwen"), HERMES_MARKS + "{# </think> #}", (), plain) as running:
        yield running


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with serve_echo(tmp_path_factory.mktemp("llama"), LLAMA_MARKS, reasoning_parser=None) as running:
        yield running


def grammar_of(service, said: str, **options) -> str | None:
    """The grammar that a request has in the engine, and which has to be taken there."""
    with seen_requests(service) as seen:
        ask(service, said, **options)
    (request,) = seen
    bounds = request.sampling_params.structured_outputs
    return None if bounds is None else bounds.grammar


@streaming
@pytest.mark.parametrize(("choice", "calls"), [("required", 2), (NAMED, 1)])
def test_a_forced_call(qwen, stream, choice, calls):
    said = f"{CALL}\n{TIME_CALL}"
    with seen_requests(qwen) as seen:
        got = ask(qwen, said, stream=stream, tools=[WEATHER, TIME], tool_choice=choice)
    assert got.read_calls == [("get_weather", ARGUMENTS), ("get_time", {})][:calls]
    assert got.finish_reason == "tool_calls"
    grammar = seen[0].sampling_params.structured_outputs.grammar
    assert ("get_time" in grammar) == (calls == 2)
    assert "<tool_call>" in grammar


def test_a_forced_call_in_llamas_form(llama):
    grammar = grammar_of(llama, LLAMA_CALL, tools=[WEATHER, TIME], tool_choice=NAMED)
    assert '\\"parameters\\": ' in grammar
    got = ask(llama, LLAMA_CALL, tools=[WEATHER, TIME], tool_choice="required")
    assert (got.content, got.read_calls, got.finish_reason) == (None, [("get_weather", ARGUMENTS)], "tool_calls")


def test_one_call_where_they_are_not_to_be_parallel(qwen):
    options = {"tools": [WEATHER, TIME], "tool_choice": "required"}
    several = grammar_of(qwen, CALL, **options)
    one = grammar_of(qwen, CALL, **options, parallel_tool_calls=False)
    assert "call)*" in several
    assert "call)*" not in one


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_held_where_nothing_is_forced(qwen, choice):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    options = {"tools": [strict]} | ({} if choice is None else {"tool_choice": choice})
    assert grammar_of(qwen, "hi", **options) is None


@pytest.mark.parametrize(
    ("thinking_of_template", "said", "has_reasoning"),
    [(None, f"<think>hm</think>{CALL}", True), (True, f"hm</think>{CALL}", True), (False, CALL, False)],
)
def test_reasoning_before_a_forced_call(qwen, thinking_of_template, said, has_reasoning):
    kwargs = {} if thinking_of_template is None else {"chat_template_kwargs": {"thinking": thinking_of_template}}
    options = {"tools": [WEATHER], "tool_choice": "required", "extra_body": kwargs}
    assert ("think_rest" in grammar_of(qwen, said, **options)) == has_reasoning
    got = ask(qwen, said, **options)
    assert (got.reasoning or "", got.read_calls) == ("hm" if has_reasoning else "", [("get_weather", ARGUMENTS)])


class Answer(BaseModel):
    city: str
    days: list[int]


@streaming
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_that_is_parsed(qwen, stream, thinks):
    said = '{"city": "Bern", "days": [1, 2]}'
    asked = {
        "model": qwen.service.model_names[0],
        "messages": [{"role": "user", "content": said if not thinks else f"hm</think>{said}"}],
        "response_format": Answer,
        "extra_body": {"chat_template_kwargs": {"thinking": thinks}},
    }
    with client_of(qwen) as client, seen_requests(qwen) as seen:
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
    assert answer.choices[0].message.parsed == Answer(city="Bern", days=[1, 2])
    bounds = seen[0].sampling_params.structured_outputs
    assert bounds.kind == ("grammar" if thinks else "json")
    assert "days" in str(bounds)


def test_tools_that_are_parsed(qwen):
    class GetWeather(BaseModel):
        city: str

    said = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Bern"}}\n</tool_call>'
    with client_of(qwen) as client:
        answer = client.chat.completions.parse(
            model=qwen.service.model_names[0],
            messages=[{"role": "user", "content": said}],
            tools=[openai.pydantic_function_tool(GetWeather)],
            tool_choice="required",
        )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Bern")


@pytest.mark.parametrize("said", ['{"city": "Bern", "days": []}', CALL])
def test_an_answer_or_calls(qwen, said):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    got = ask(qwen, said, tools=[WEATHER], response_format=form)
    if said == CALL:
        assert (got.content, got.read_calls) == (None, [("get_weather", ARGUMENTS)])
    else:
        assert (json.loads(got.content), got.calls) == (json.loads(said), [])
    grammar = grammar_of(qwen, said, tools=[WEATHER], response_format=form)
    assert "days" in grammar
    assert "get_weather" in grammar


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_format_says_nothing_of_forced_calls(qwen, choice):
    options = {"tools": [WEATHER], "tool_choice": choice, "response_format": {"type": "json_object"}}
    assert ask(qwen, CALL, **options).read_calls == [("get_weather", ARGUMENTS)]
    assert grammar_of(qwen, CALL, **options) == grammar_of(qwen, CALL, tools=[WEATHER], tool_choice=choice)


def _body(**fields):
    return {"messages": [{"role": "user", "content": "a"}], "tools": [WEATHER]} | fields


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (_body(tool_choice="required", guided_json={}), "guided_json", "tool_choice"),
        (_body(tool_choice=NAMED, structured_outputs={"regex": "a"}), "structured_outputs", "tool_choice"),
        (_body(tool_choice="required", min_tokens=1), "min_tokens", "structured_outputs"),
        (
            _body(
                tool_choice="required",
                tools=[{"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70_000}}}],
            ),
            "tools",
            "65536",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_go_together(qwen, body, param, says, stream):
    answer = http.post(f"{qwen.url}/v1/chat/completions", json=body | {"stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]
    assert qwen.service.concurrency.num_in_flight == 0


def test_tokenize_with_tools(qwen):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    tokens = http.post(f"{qwen.url}/tokenize", json=body).json()["tokens"]
    text = qwen.engine.get_tokenizer().decode(tokens, skip_special_tokens=False)
    assert text.startswith(json.dumps(WEATHER, ensure_ascii=False) + "user:hi;")
    for wrong, param in (
        ({"prompt": "a", "tools": [WEATHER]}, "tools"),
        (body | {"tools": [WEATHER, WEATHER]}, "tools"),
        (body | {"tools": [{"type": "x"}]}, "tools[0].type"),
    ):
        answer = http.post(f"{qwen.url}/tokenize", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
