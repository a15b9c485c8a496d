"""OpenAI's client: what the tests of the service do not use of it."""

from __future__ import annotations

import time

import pytest
from said import BERN, CALL, IMAGE, JSON, REASONED_CALL, SCHEMA, TOOL, City, user

from ringcore.openai_api.errors import over_limit

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, url):
    with openai.OpenAI(base_url=url, api_key="none") as made:
        yield made


def test_the_streaming_helpers(client):
    with client.chat.completions.stream(model="echo", messages=user(REASONED_CALL), tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= set(kinds)
    assert (call.function.name, call.function.arguments) == ("weather", JSON)
    with client.chat.completions.stream(model="echo", messages=user(JSON), response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == BERN
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    with client.responses.stream(model="echo", input=REASONED_CALL, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.completed"} <= set(kinds)
    assert [one.type for one in response.output] == ["reasoning", "message", "function_call"]


def test_a_conversation_by_references(client):
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    first = client.responses.create(model="echo", input=CALL, tools=[tool])
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
    items = [*({"type": "item_reference", "id": one.id} for one in first.output), result, *user("thanks")]
    assert client.responses.create(model="echo", input=items).output_text == "thanks"


def test_embeddings(client):
    for asked in ({}, {"encoding_format": "float"}):  # by itself the client asks for base64, and decodes it
        found = client.embeddings.create(model="echo", input=["a", "b"], **asked)
        assert [len(one.embedding) for one in found.data] == [16, 16]


def test_images_are_refused(openai, client):
    content = [{"type": "image_url", "image_url": {"url": IMAGE}}]
    with pytest.raises(openai.BadRequestError, match="a part of type 'image_url'"):
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": content}])
    content = [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    with pytest.raises(openai.BadRequestError, match="a part of type 'input_image'"):
        client.responses.create(model="echo", input=[{"role": "user", "content": content}])


def test_retries(client, fails_once):
    fails_once(over_limit(9, 9))
    began = time.monotonic()
    assert client.chat.completions.create(model="echo", messages=user("a")).choices[0].message.content == "a"
    assert time.monotonic() - began > 0.9  # Retry-After says one second


def test_a_timeout(openai, client, service, monkeypatch):
    monkeypatch.setattr(service.service, "check_started", lambda: time.sleep(0.5))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1, max_retries=0).chat.completions.create(model="echo", messages=user("a"))


def test_an_aborted_stream(client):
    with client.chat.completions.create(model="echo", messages=user("x" * 900), stream=True) as stream:
        for _, chunk in zip(range(5), stream, strict=False):
            assert chunk.choices[0].finish_reason is None


def test_asyncio(openai, url):
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.chat.completions.create(model="echo", messages=user("hi"), stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]

    assert "".join(asyncio.run(ask())) == "hi"
