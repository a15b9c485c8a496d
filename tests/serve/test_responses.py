"""/v1/responses by the official client: answers, their events, conversations that are stored, and what is refused."""

from __future__ import annotations

import json

import openai
import pytest
from chat_answers import ARGUMENTS, BROKEN, CALL, TIME_CALL, WEATHER, client_of, streaming
from echo_model import HERMES_MARKS, SAID, SAY, serve_echo
from engine_spy import seen_requests
from pydantic import BaseModel
from running_service import http

from ringcore.errors import EngineDeadError
from ringcore.openai_api.errors import ApiError
from ringcore.openai_api.responses.store import ResponseStore, StoredResponse

TOOL = {"type": "function", **WEATHER["function"], "strict": False}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": None}
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MAX_STORED = 6


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    with serve_echo(folder, HERMES_MARKS, (), PLAIN, max_stored_responses=MAX_STORED) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with client_of(service) as made:
        yield made


def ask(client, say, *, stream: bool = False, **fields):
    """The response, whole or as the last event of a stream has it; its events are those that add up to it."""
    body = {"model": None, "input": say} | fields
    if not stream:
        return client.responses.create(**body)
    begun, in_progress, *events, last = client.responses.create(**body, stream=True)
    assert (begun.type, in_progress.type) == ("response.created", "response.in_progress")
    assert [one.sequence_number for one in (begun, in_progress, *events, last)] == list(range(len(events) + 3))
    assert (begun.response.status, begun.response.output) == ("in_progress", [])
    assert last.type == f"response.{last.response.status}"
    check_events(events, last.response.output)
    return last.response


def check_events(events, output) -> None:
    texts: list[str] = []
    for event in events:
        at, item = event.output_index, output[event.output_index]
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            texts.append("")
            assert (at, event.item.status, event.item.id) == (len(texts) - 1, "in_progress", item.id)
            continue
        assert at == len(texts) - 1, "only the last item is open"
        match kind:
            case "output_item.done":
                assert event.item.model_dump() == item.model_dump()
            case "content_part.added":
                assert event.part.text == ""
            case "content_part.done":
                assert event.part.text == texts[-1] == item.content[0].text
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                texts[-1] += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert (event.text, event.item_id) == (texts[-1], item.id)
            case "function_call_arguments.done":
                assert (event.arguments, event.item_id) == (texts[-1], item.id)
            case _:
                raise AssertionError(kind)
    assert len(texts) == len(output)


@streaming
def test_a_text(client, service, stream):
    got = ask(client, "It is 4.", stream=stream, metadata={"a": "b"}, temperature=0.5)
    assert (got.output_text, got.status, got.error, got.incomplete_details) == ("It is 4.", "completed", None, None)
    assert (got.model, got.metadata, got.temperature, got.top_p) == (service.service.model_names[0], {"a": "b"}, 0.5, 1)
    assert got.usage.output_tokens == len("It is 4.") + 1
    assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens
    assert got.usage.output_tokens_details.reasoning_tokens == 0


@streaming
def test_reasoning_text_and_calls(client, stream):
    said = f"<think>hm</think>Let me look.\n{CALL}\n{TIME_CALL}"
    got = ask(client, said, stream=stream, tools=[TOOL, TIME], reasoning={"effort": "low", "summary": "auto"})
    reasoning, message, *calls = got.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "hm")
    assert message.content[0].text == "Let me look."
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("get_weather", ARGUMENTS), ("get_time", {})]
    assert {one.status for one in got.output} == {got.status} == {"completed"}
    assert 0 < got.usage.output_tokens_details.reasoning_tokens < got.usage.output_tokens


@streaming
def test_what_is_cut_short_is_incomplete(client, stream):
    got = ask(client, "one, two", stream=stream, max_output_tokens=3)
    assert (got.output_text, got.status, got.incomplete_details.reason) == ("one", "incomplete", "max_output_tokens")
    assert got.output[0].status == "incomplete"


def test_a_conversation_goes_on_after_what_was_cut_short(client, service):
    cut = ask(
        client, f"<think>hm</think>Look: {CALL}", tools=[TOOL], max_output_tokens=60, text={"verbosity": "medium"}
    )
    assert (cut.status, cut.text.format.type) == ("incomplete", "text")
    written = prompt_of(service, client, "x", previous_response_id=cut.id)
    assert ";assistant:(hm)Look:" in written


@streaming
def test_a_call_that_breaks_off_is_text(client, stream):
    got = ask(client, BROKEN, stream=stream, tools=[TOOL])
    assert [(one.type, one.status) for one in got.output] == [
        *[("function_call", "incomplete")] * stream,
        ("message", "completed"),
    ]
    assert got.output_text == BROKEN


@pytest.mark.parametrize(
    ("choice", "calls"), [("auto", 2), ("required", 2), ({"type": "function", "name": "get_weather"}, 1), ("none", 0)]
)
def test_tool_choice(client, service, choice, calls):
    with seen_requests(service) as seen:
        got = ask(client, f"{CALL}\n{TIME_CALL}", tools=[TOOL, TIME], tool_choice=choice)
    kinds = [item.type for item in got.output]
    assert kinds[:calls] == ["function_call"] * calls
    assert set(kinds[calls:]) <= {"message"}  # this model heeds no grammar: what it may not call is text
    assert (seen[0].sampling_params.structured_outputs is not None) == (choice not in ("auto", "none"))


class Answer(BaseModel):
    city: str


def test_a_schema(client, service):
    with seen_requests(service) as seen:
        answer = client.responses.parse(model=None, input='{"city": "Bern"}', text_format=Answer)
    assert answer.output_parsed == Answer(city="Bern")
    assert "city" in seen[0].sampling_params.structured_outputs.grammar


def prompt_of(service, client, items, **fields) -> str:
    """The prompt that the engine gets, up to what the model is told to say."""
    with seen_requests(service) as seen:
        ask(client, items, max_output_tokens=8, store=False, **fields)
    text = service.engine.get_tokenizer().decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    return text.partition(SAY)[0] + text.partition(SAID)[2]


def test_a_conversation_is_written_out(client, service):
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Bern"}'}
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "of another service"},
        {"role": "user", "content": "hi"},
    ]
    written = prompt_of(service, client, items, instructions="be kind", reasoning={"effort": "none"})
    assert written == (
        "system:be kind\n\nbe brief;user:a\nb;assistant:(hm)okget_weather(Bern);tool:rain;user:hi;"
        "<think>\n\n</think>\n\n"
    )


@streaming
def test_a_stored_conversation_goes_on(client, service, stream):
    first = ask(client, f"<think>hm</think>{CALL}", stream=stream, tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"}
    follow_up = [result, {"role": "user", "content": "x"}]
    second = ask(client, follow_up, stream=stream, previous_response_id=first.id, instructions="now")
    assert (second.output_text, second.previous_response_id) == ("x", first.id)
    written = prompt_of(service, client, "y", previous_response_id=second.id)
    assert written.startswith("user:<think>")
    assert written.endswith(";assistant:(hm)get_weather(Zürich);tool:rain;user:x;assistant:x;user:y;")
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    client.responses.delete(first.id)
    assert prompt_of(service, client, "y", previous_response_id=second.id) == written
    for gone in (first.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(gone)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(gone)
        with pytest.raises(openai.NotFoundError) as caught:
            ask(client, "x", previous_response_id=gone)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_stored_items_are_referred_to(client, service):
    first = ask(client, f"<think>hm</think>Look.{CALL}", tools=[TOOL])
    references = [{"type": "item_reference", "id": one.id} for one in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    items = [{"role": "user", "content": "a"}, *references, result, {"role": "user", "content": "x"}]
    assert prompt_of(service, client, items) == "user:a;assistant:(hm)Look.get_weather(Zürich);tool:rain;user:x;"
    with pytest.raises(openai.BadRequestError, match="once"):
        ask(client, [*references, references[0]])
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="send the item itself"):
        ask(client, items)


def test_input_items_are_listed(client):
    first = ask(client, f"<think>hm</think>{CALL}", tools=[TOOL], instructions="be kind")
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain", "id": "fco_1"}
    user = {"role": "user", "content": "x", "id": "fco_1"}
    reference = {"type": "item_reference", "id": first.output[0].id}
    second = ask(client, [result, reference, user], previous_response_id=first.id)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # the client asks for every page
    kinds = ["message", "reasoning", "function_call", "function_call_output", "reasoning", "message"]
    assert [one.type for one in listed] == kinds
    assert [one.id for one in listed[1:4]] == [first.output[0].id, first.output[1].id, "fco_1"]
    assert len({one.id for one in listed}) == len(listed)
    assert (listed[4].content[0].text, listed[5].content[0].text, listed[5].status) == ("hm", "x", "completed")
    page = client.responses.input_items.list(second.id, limit=4)
    assert [one.id for one in page.data] == [one.id for one in reversed(listed)][:4]
    assert (page.has_more, page.last_id) == (True, listed[2].id)
    rest = client.responses.input_items.list(second.id, after=page.last_id)
    assert [one.id for one in rest.data] == [listed[1].id, listed[0].id]
    assert not client.responses.input_items.list(second.id, after=listed[0].id).data
    for wrong, param in (({"after": "none"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(second.id, **wrong)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_input_tokens_are_counted(client):
    asked = {"instructions": "be kind", "tools": [TOOL], "reasoning": {"effort": "none"}}
    got = ask(client, "x", max_output_tokens=2, **asked)
    counted = client.responses.input_tokens.count(input="x", **asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", got.usage.input_tokens)
    after = ask(client, "y", previous_response_id=got.id)
    counted = client.responses.input_tokens.count(input="y", previous_response_id=got.id)
    assert counted.input_tokens == after.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="truncation"):
        client.responses.input_tokens.count(input="x", truncation="auto")


def test_every_effort_and_verbosity(client, service):
    for effort in ("minimal", "xhigh"):
        got = ask(client, "x", reasoning={"effort": effort}, text={"verbosity": "low"})
        assert (got.output_text, got.reasoning.effort, got.text.verbosity) == ("x", effort, "low")


def test_what_is_stored_is_bounded(client, service):
    kept, *others = [ask(client, f"{i}") for i in range(MAX_STORED)]
    client.responses.retrieve(kept.id)  # it is used, and so the second one is the oldest
    unstored = ask(client, "x", store=False)
    assert not unstored.model_extra["store"]
    last = ask(client, "x")
    assert len(service.service_app.state.responses) == MAX_STORED
    for here in (kept, *others[1:], last):
        assert client.responses.retrieve(here.id).output_text == here.output_text
    for gone in (others[0], unstored):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def stored(name: str, size: int) -> StoredResponse:
    return StoredResponse({"id": name, "output": [{"id": f"item of {name}"}]}, [{"text": "x" * size}])


def test_the_bound_of_bytes():
    store = ResponseStore(max_responses=10, max_bytes=1000)
    for name in "abc":
        store.put(stored(name, 200))
    assert (len(store), store.num_bytes <= 1000) == (3, True)
    store.put(stored("too large", 1000))
    assert len(store) == 3
    store.get("a")
    store.put(stored("d", 500))
    assert [name for name in "abcd" if _has(store, name)] == ["a", "d"]
    assert store.get_item("item of d", "input") == {"id": "item of d"}
    with pytest.raises(ApiError):
        store.get_item("item of b", "input")
    store.delete("a")
    store.delete("d")
    assert (len(store), store.num_bytes) == (0, 0)
    none = ResponseStore(max_responses=0, max_bytes=1000)
    none.put(stored("a", 1))
    assert (len(none), none.keeps_any) == (0, False)


def _has(store: ResponseStore, name: str) -> bool:
    try:
        return store.get(name).response["id"] == name
    except ApiError:
        return False


def item(**fields):
    return {"input": [{"role": "user", "content": "a"}, fields]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "string"),
        ({"input": []}, "input", "at least 1"),
        (item(type="computer_call", id="a"), "input[1].type", "'item_reference'"),
        (item(type="item_reference"), "input[1].id", "string"),
        (item(role="tool", content="a"), "input[1].role", "'developer'"),
        (item(role="user"), "input[1].content", "give a string"),
        (item(role="user", content=[{"type": "input_image"}]), "input[1].content[0]", "'input_image'"),
        (item(type="function_call", call_id="c", name="f", arguments="["), "input[1].arguments", "JSON object"),
        (item(type="function_call", call_id="c", name="f", arguments="[]"), "input[1].arguments", "JSON object"),
        (item(type="function_call", call_id="c", name=5, arguments=""), "input[1].name", "string"),
        (item(type="function_call_output", output="a"), "input[1].call_id", "string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"temperature": -1}, "temperature", "0"),
        ({"background": True}, "background", "not served here"),
        ({"truncation": "auto"}, "truncation", "not served here"),
        ({"conversation": "a"}, "conversation", "not served here"),
        ({"include": ["file_search_call.results"]}, "include[0]", "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is a built-in tool"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", "object"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'required'"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format", "schema"),
        ({"reasoning": {"effort": "most"}}, "reasoning", "'high'"),
        ({"moderation": {"model": "a"}}, "moderation", "nothing is moderated here"),
        ({"input": "x" * 5000}, "input", "max_model_len"),
        ({"tools": [TOOL | {"parameters": {"a": "\ud800"}}], "tool_choice": "none"}, "tools", "JSON"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"a": "\ud800"}}}}, "text.format", ""),
        (item(type="reasoning", summary=[], content="\ud800"), "input", "JSON"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(service, fields, param, says):
    content = json.dumps({"input": "a"} | fields)  # lone surrogates are escaped
    answer = http.post(f"{service.url}/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


def test_an_error_in_a_stream_is_its_last_event(client, service, monkeypatch):
    def fail(output):
        if output.finished:
            raise EngineDeadError("a worker died", process="engine")

    monkeypatch.setattr(service.service.model, "_observe", fail)
    *_, before, last = client.responses.create(model=None, input="x" * 500, stream=True)
    assert before.type == "response.output_text.delta"
    assert (last.type, last.response.status, last.sequence_number) == (
        "response.failed",
        "failed",
        before.sequence_number + 1,
    )
    assert (last.response.error.code, last.response.error.message) == ("server_error", "a worker died")
    with pytest.raises(openai.InternalServerError, match="a worker died"):
        ask(client, "x")


def test_a_stored_response_is_not_streamed(client, service):
    got = ask(client, "x")
    answer = http.get(f"{service.url}/v1/responses/{got.id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    answer = http.request("PATCH", f"{service.url}/v1/responses/{got.id}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD, OPTIONS")
