"""Anthropic's /v1/messages: what a client gets, what the model is shown, and what is refused."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from chat_answers import ARGUMENTS, BROKEN, CALL, TIME_CALL, WEATHER, streaming
from echo_model import HERMES_MARKS, MAX_MODEL_LEN, SAID, SAY, serve_echo
from engine_spy import seen_requests
from running_service import DEADLINE_S, http

from ringcore.errors import EngineDeadError
from ringcore.serve.messages import MESSAGE_EVENTS
from ringcore.serve.streaming import EventStream

KEY = "key"
TOOL = {
    "name": "get_weather",
    "description": "the weather",
    "input_schema": WEATHER["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object"}}
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve_echo(tmp_path_factory.mktemp("qwen"), HERMES_MARKS, (), PLAIN, api_keys=(KEY,)) as running:
        yield running


def post(service, path="/v1/messages", **body):
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    return http.post(service.url + path, json=body, headers=headers)


def asked(say: str, **fields):
    return {"messages": [{"role": "user", "content": say}], "max_tokens": 1024} | fields


def events_of(answer) -> list[dict]:
    """Of a stream, each of which has its own name."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for lines in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def ask(service, say: str, *, stream: bool = False, **fields) -> dict:
    """The message, whole or added up from its events as a client does it."""
    answer = post(service, **asked(say, stream=stream, **fields))
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    begun, ping, *events, delta, stop = events_of(answer)
    assert (begun["type"], ping["type"], stop) == ("message_start", "ping", {"type": "message_stop"})
    message = begun["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    blocks = message["content"]
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                add(blocks[-1], event["delta"])
            case "content_block_stop" if blocks[-1]["type"] == "tool_use" and isinstance(blocks[-1]["input"], str):
                with suppress(ValueError):  # of a call that broke off
                    blocks[-1]["input"] = json.loads(blocks[-1]["input"])
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


def add(block: dict, delta: dict) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["input"] = (block["input"] or "") + delta["partial_json"]


def text(said: str) -> dict:
    return {"type": "text", "text": said}


def call_of(block: dict) -> tuple:
    return block["type"], block["name"], block["input"]


@streaming
def test_a_text(service, stream):
    got = ask(service, "It is 4.", stream=stream)
    assert (got["content"], got["stop_reason"], got["stop_sequence"]) == ([text("It is 4.")], "end_turn", None)
    assert (got["type"], got["role"], got["model"]) == ("message", "assistant", service.service.model_names[0])
    assert got["id"].startswith("msg_")
    assert got["usage"]["output_tokens"] == len("It is 4.") + 1


@streaming
def test_thinking_text_and_calls(service, stream):
    said = f"<think>hm</think>Let me look.\n{CALL}\n{TIME_CALL}"
    got = ask(service, said, stream=stream, tools=[TOOL, TIME])
    thinking, content, *calls = got["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert content == text("Let me look.")
    assert [call_of(one) for one in calls] == [("tool_use", "get_weather", ARGUMENTS), ("tool_use", "get_time", {})]
    assert len({one["id"] for one in calls}) == 2
    assert (got["stop_reason"], got["stop_sequence"]) == ("tool_use", None)


@streaming
def test_why_it_stops(service, stream):
    got = ask(service, "one, two", stream=stream, stop_sequences=[","])
    assert (got["content"], got["stop_reason"], got["stop_sequence"]) == ([text("one")], "stop_sequence", ",")
    got = ask(service, "one, two", stream=stream, max_tokens=3)
    assert (got["content"], got["stop_reason"], got["stop_sequence"]) == ([text("one")], "max_tokens", None)
    got = ask(service, "x" * 1000, stream=stream, max_tokens=MAX_MODEL_LEN)
    assert got["stop_reason"] == "model_context_window_exceeded"
    assert ask(service, "", stream=stream)["content"] == []


@streaming
def test_a_call_that_breaks_off_is_text(service, stream):
    got = ask(service, f"<think>hm</think>{BROKEN}", stream=stream, tools=[TOOL])
    kinds = [block["type"] for block in got["content"]]
    assert kinds == ["thinking", *["tool_use"] * stream, "text"]
    assert (got["content"][-1], got["stop_reason"]) == (text(BROKEN), "end_turn")


@streaming
@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "any"}, 2),
        ({"type": "tool", "name": "get_weather"}, 1),
        ({"type": "none"}, 0),
    ],
)
def test_tool_choice(service, stream, choice, calls):
    with seen_requests(service) as seen:
        got = ask(service, f"{CALL}\n{TIME_CALL}", stream=stream, tools=[TOOL, TIME], tool_choice=choice)
    kinds = [block["type"] for block in got["content"]]
    assert kinds[:calls] == ["tool_use"] * calls
    assert set(kinds[calls:]) <= {"text"}  # this model heeds no grammar: what it may not call is text
    assert (seen[0].sampling_params.structured_outputs is not None) == (choice["type"] in ("any", "tool"))


def test_sampling_parameters_and_a_schema(service):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    with seen_requests(service) as seen:
        ask(service, "{}", **given, output_config={"format": {"type": "json_schema", "schema": schema}})
    params = seen[0].sampling_params
    assert {name: getattr(params, name) for name in given} == given
    assert '"integer"' in params.structured_outputs.grammar  # after the reasoning


def test_a_conversation_is_written_out(service):
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "ok"}, call],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no sun", "is_error": True},
                {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    body = {
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        "messages": messages,
        "thinking": {"type": "disabled"},
    }
    wanted = (
        "system:be\nbrief;user:a\nb;assistant:(hm)okget_weather(Bern);tool:rain;tool:Error: no sun;user:hi;"
        f"{SAY}hi{SAID}<think>\n\n</think>\n\n"
    )
    with seen_requests(service) as seen:
        got = post(service, **body, max_tokens=8).json()
    prompt = service.engine.get_tokenizer().decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert (prompt, got["content"]) == (wanted, [text("hi")])
    counted = post(service, "/v1/messages/count_tokens", **body)
    assert counted.json() == {"input_tokens": len(seen[0].prompt_token_ids)}
    again = post(service, **body, max_tokens=8).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == counted.json()["input_tokens"]


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages: "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": 5}, "system: give a string"),
        ({"system": [{"type": "image"}]}, "system[0].type: a block of type 'image'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: give 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: give a string"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "end with the user's",
        ),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type: a block of type 'image'"),
        (user("x"), "messages[0].content[0].type: no block"),
        (user({"type": "text"}), "messages[0].content[0]: give {'type': 'text'"),
        (user({"type": "tool_result", "tool_use_id": "a", "content": 5}), "messages[0].content[0].content: "),
        (user({"type": "tool_result", "tool_use_id": "a", "is_error": 5}), "messages[0].content[0].is_error: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: Value error, 'web_search"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type: "),
        ({"tools": [TOOL, TOOL]}, "tools: 2 have the name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "tool_choice: no tool has the name 'f'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format: "),
        ({"output_config": {"effort": "most"}}, "output_config: "),
        ({"thread": {"type": "create"}}, "thread: "),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: "),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(service, fields, says):
    answer = post(service, **asked("a") | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert says in error["error"]["message"]


def test_tool_runners_learn_that_there_are_no_threads(service):
    error = post(service, **asked("a", thread={"type": "create"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert ask(service, "a", thread=None, output_config={"effort": "max"})["content"] == [text("a")]


@pytest.mark.parametrize(
    ("headers", "body", "status", "kind"),
    [
        ({}, asked("a"), 401, "authentication_error"),
        ({"x-api-key": "other"}, asked("a"), 401, "authentication_error"),
        ({"Authorization": f"Bearer {KEY}"}, asked("a", model="another"), 404, "not_found_error"),
        ({"x-api-key": KEY}, asked("x" * (5 << 20)), 413, "request_too_large"),
        ({"x-api-key": KEY, "Origin": "http://a"}, asked("a"), 403, "permission_error"),
    ],
)
def test_errors_have_their_types(service, headers, body, status, kind):
    answer = http.post(f"{service.url}/v1/messages", json=body, headers=headers)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)


def test_an_error_in_a_stream_is_an_event():
    async def produce(emit) -> None:
        await emit({"type": "message_start"})
        raise EngineDeadError("a worker died", process="engine")

    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    async def receive():
        return await asyncio.Future()

    asyncio.run(EventStream(produce, MESSAGE_EVENTS)({}, receive, send))
    event = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "a worker died"}})
    assert sent[1] == b'event: message_start\ndata: {"type":"message_start"}\n\n'
    assert b"".join(sent[2:]).decode() == f"event: error\ndata: {event}\n\n".replace('": ', '":').replace(', "', ',"')


def test_a_wrong_method(service):
    answer = http.get(f"{service.url}/v1/messages/count_tokens", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.long_form  # its import alone takes two seconds
def test_the_official_client(service):
    import anthropic

    said = f"<think>hm</think>Let me look.\n{CALL}"
    with anthropic.Anthropic(base_url=service.url, api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
        body = {"model": service.service.model_names[0], "tools": [TOOL], **asked(said)}
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert (message.content[2].input, message.stop_reason) == (ARGUMENTS, "tool_use")
        history = [*body["messages"], {"role": "assistant", "content": streamed.content}]
        result = {"type": "tool_result", "tool_use_id": streamed.content[2].id, "content": "rain"}
        history.append({"role": "user", "content": [result, {"type": "text", "text": "thanks"}]})
        assert client.messages.create(**body | {"messages": history}).content[0].text == "thanks"
        count = client.messages.count_tokens(model=body["model"], messages=body["messages"])
        assert count.input_tokens < whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**body | {"model": "another"})
