"""Requests to /v1/chat/completions with tools and calls in them: what the model is shown, and what is refused."""

from __future__ import annotations

import json

import openai
import pytest
from chat_answers import CALL, TIME, WEATHER, ask, client_of
from echo_model import HERMES_MARKS, SAID, SAY, serve_echo
from engine_spy import seen_requests


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve_echo(tmp_path_factory.mktemp("model"), HERMES_MARKS) as running:
        yield running


def test_a_conversation_with_calls_is_written_out(service):
    call = {"id": "call_1", "type": "function"}
    messages = [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "refusal": None,
            "tool_calls": [call | {"function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    shown = WEATHER["function"]
    asked = {"tools": [{"type": "function", "function": shown | {"strict": True}}], "max_tokens": 1}
    text = _prompt_of(service, "hi", messages, **asked)
    assert text == (
        json.dumps(WEATHER, ensure_ascii=False) + f"user:hi;assistant:(hm)get_weather(Bern);tool:rain;{SAY}hi{SAID}"
    )
    text = _prompt_of(service, "hi", messages[:0], **asked, tool_choice="none")
    assert text == f"user:hi;{SAY}hi{SAID}"


def _prompt_of(service, say: str, messages, **options) -> str:
    """The prompt that the engine gets."""
    with seen_requests(service) as seen:
        ask(service, say, messages=messages, **options)
    (request,) = seen
    return service.engine.get_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)


def test_an_answer_can_be_sent_back(service):
    with client_of(service) as client:
        question = {"role": "user", "content": CALL}
        name = service.service.model_names[0]
        first = client.chat.completions.create(model=name, messages=[question], tools=[WEATHER])
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        second = client.chat.completions.create(
            model=name,
            messages=[question, message.model_dump(), result, {"role": "user", "content": "thanks"}],
            tools=[WEATHER],
        )
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("thanks", "stop")


def _tool(**function):
    return {"tools": [{"type": "function", "function": function}]}


def _calls(*calls):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": list(calls)}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
        (_tool(), "tools[0].function.name", "required"),
        (_tool(name="two words"), "tools[0].function.name", "pattern"),
        (_tool(name="f", parameters=["x"]), "tools[0].function.parameters", "dictionary"),
        (_tool(name="f", parameters={"type": "array"}), "tools[0].function.parameters.type", "'object'"),
        (_tool(name="f", parameters={"properties": 5}), "tools[0].function.parameters.properties", "schema"),
        (_tool(name="f", parameters={"required": "x"}), "tools[0].function.parameters.required", "names"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "'get_weather'"),
        ({"tools": [WEATHER], "tool_choice": TIME}, "tool_choice", "'get_time'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice", "'none'"),
        ({"functions": [WEATHER["function"]]}, "functions", "not served"),
        (_calls("x"), "messages[1].tool_calls[0]", "'arguments'"),
        (_calls({"function": {"name": "f", "arguments": 5}}), "messages[1].tool_calls[0]", "'arguments'"),
        (
            _calls({"function": {"name": "f", "arguments": "{"}}),
            "messages[1].tool_calls[0].function.arguments",
            "JSON object",
        ),
        (_calls({"id": 5, "function": {"name": "f", "arguments": ""}}), "messages[1].tool_calls[0].id", "string"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages[0].tool_calls", "'assistant'"),
        ({"messages": [{"role": "assistant", "reasoning_content": 5}]}, "messages[0].reasoning_content", "string"),
        ({"messages": [{"role": "tool", "tool_call_id": 5}]}, "messages[0].tool_call_id", "string"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(service, fields, param, says):
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    with client_of(service) as client, pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    assert says in caught.value.message
