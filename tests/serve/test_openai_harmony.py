"""A model of harmony's messages behind the service: what its answers are, and what its template is given."""

from __future__ import annotations

import json

import pytest
from chat_answers import ARGUMENTS, TIME, WEATHER, ask, client_of, streaming
from echo_model import serve_echo
from engine_spy import seen_requests
from pydantic import BaseModel
from running_service import http

from ringcore.chat import ChatFormat

# Its template tells the format, and shows what it is given of a conversation.
MARKS = (
    "{# <|start|>assistant<|channel|>final<|message|> #}{{ reasoning_effort }}|"
    "{% for m in messages %}{% if m.thinking %}[{{ m.thinking }}]{% endif %}{% endfor %}"
)
MARKERS = tuple(sorted(ChatFormat(None, "harmony").markers))
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + json.dumps(ARGUMENTS)
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve_echo(tmp_path_factory.mktemp("gpt-oss"), MARKS, MARKERS, eos="<|endoftext|>") as running:
        yield running


@streaming
def test_reasoning_and_answer(service, stream):
    got = ask(service, f"{ANALYSIS}{FINAL}It is 4.", stream=stream)
    assert (got.reasoning, got.content, got.finish_reason) == ("hm", "It is 4.", "stop")


@streaming
def test_a_call_ends_an_answer(service, stream):
    said = f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>never"
    with seen_requests(service) as seen:
        got = ask(service, said, stream=stream, tools=[WEATHER, TIME])
    assert (got.reasoning, got.content, got.read_calls) == ("hm", "I look.", [("get_weather", ARGUMENTS)])
    assert got.finish_reason == "tool_calls"
    tokenizer = service.engine.get_tokenizer()
    stops = [tokenizer.decode([token_id], False) for token_id in seen[0].sampling_params.stop_token_ids]
    assert sorted(stops) == ["<|call|>", "<|return|>"]


@streaming
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call(service, stream, choice):
    with seen_requests(service) as seen:
        got = ask(service, ANALYSIS + CALL, stream=stream, tools=[WEATHER, TIME], tool_choice=choice)
    assert (got.reasoning, got.read_calls, got.finish_reason) == (
        "hm",
        [("get_weather", ARGUMENTS)],
        "tool_calls",
    )
    grammar = seen[0].sampling_params.structured_outputs.grammar
    assert ("functions.get_time" in grammar) == (choice == "required")


class Answer(BaseModel):
    city: str


def test_a_format_is_that_of_the_final_channel(service):
    said = f'{ANALYSIS}<|channel|>final <|constrain|>json<|message|>{{"city": "Bern"}}'
    with client_of(service) as client, seen_requests(service) as seen:
        answer = client.chat.completions.parse(
            model=service.service.model_names[0],
            messages=[{"role": "user", "content": said}],
            response_format=Answer,
        )
    assert answer.choices[0].message.parsed == Answer(city="Bern")
    assert "analysis" in seen[0].sampling_params.structured_outputs.grammar


def test_what_the_template_is_given(service):
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, call | {"id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
    ]
    with seen_requests(service) as seen:
        ask(service, "x", messages=messages, reasoning_effort="high")
    prompt = service.engine.get_tokenizer().decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    wanted = "high|[hm]user:x;assistant:get_weather(Bern);tool:rain;assistant:get_weather(Bern);tool:sun;"
    assert prompt.startswith(wanted)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reasoning_effort": "most"}, "'xhigh' or 'max'"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "leave one out"),
    ],
)
def test_an_effort_that_is_none(service, fields, says):
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    answer = http.post(f"{service.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
    assert says in answer.json()["error"]["message"]
