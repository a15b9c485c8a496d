"""Anthropic's client: what the tests of the service do not use of it."""

from __future__ import annotations

import time

import pytest
from said import BERN, CALL, JSON, REASONED_CALL, SCHEMA, City, user

from ringcore.openai_api.errors import over_limit

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]

TOOL = {"name": "weather", "description": "the weather", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic, service):
    with anthropic.Anthropic(base_url=service.url, api_key="none") as made:
        yield made


def asked(text: str) -> dict:
    return {"model": "echo", "max_tokens": 1024, "messages": user(text)}


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(client, choice):
    message = client.messages.create(**asked(CALL), tools=[TOOL], tool_choice=choice)
    assert [(one.type, one.input) for one in message.content] == [("tool_use", {"city": "Bern"})]


def test_a_stream(client):
    with client.messages.stream(**asked(REASONED_CALL), tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"thinking", "text", "input_json", "content_block_stop"} <= kinds
    assert [one.type for one in message.content] == ["thinking", "text", "tool_use"]


def test_the_tool_runner(anthropic, client):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """the weather"""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(**asked(CALL), tools=[weather], max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]


def test_a_schema(client):
    assert client.messages.parse(**asked(JSON), output_format=City).parsed_output == BERN


def test_retries_and_errors(anthropic, client, fails_once):
    fails_once(over_limit(9, 9))
    began = time.monotonic()
    assert client.messages.create(**asked("a")).content[0].text == "a"
    assert time.monotonic() - began > 0.9  # Retry-After says one second
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    with pytest.raises(anthropic.BadRequestError, match="a block of type 'image'"):
        client.messages.create(model="echo", max_tokens=8, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked("x" * 3000))


def test_an_aborted_stream(client):
    with client.messages.stream(**asked("x" * 900)) as stream:
        for _, text in zip(range(5), stream.text_stream, strict=False):
            assert text
