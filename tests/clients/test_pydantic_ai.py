"""pydantic-ai over chat completions and over responses."""

from __future__ import annotations

import asyncio

import pytest
from said import BERN, JSON, REASONED, REASONED_CALL, City, call

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(request, url):
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    return getattr(models, request.param)("echo", provider=provider)


@pytest.fixture
def agent(model):
    from pydantic_ai import Agent

    return lambda **options: Agent(model, **options)


def test_a_conversation(agent):
    first = agent(instructions="be brief").run_sync(REASONED)
    assert first.output == "yes"
    assert [part.part_kind for part in first.all_messages()[-1].parts] == ["thinking", "text"]
    assert agent().run_sync("again", message_history=first.all_messages()).output == "again"


def test_a_stream(agent):
    async def read() -> str:
        async with agent().run_stream(REASONED) as answer:
            return "".join([text async for text in answer.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(read()) == "yes"


def test_a_tool(agent):
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.usage import UsageLimits

    cities: list[str] = []
    caller = agent()

    @caller.tool_plain
    def weather(city: str) -> str:
        cities.append(city)
        return "rain"

    # The model says it again after each result: the second request has the first one's answer and result.
    with pytest.raises(UsageLimitExceeded):
        caller.run_sync(REASONED_CALL, usage_limits=UsageLimits(request_limit=2))
    assert cities == ["Bern", "Bern"]


def test_outputs_with_a_schema(agent):
    from pydantic_ai import NativeOutput, PromptedOutput

    assert agent(output_type=City).run_sync(call("final_result")).output == BERN
    for kind in (NativeOutput, PromptedOutput):
        assert agent(output_type=kind(City)).run_sync(JSON).output == BERN


def test_settings(agent):
    settings = {
        "openai_reasoning_effort": "minimal",
        "openai_reasoning_summary": "auto",
        "openai_text_verbosity": "low",
        "temperature": 0.5,
        "max_tokens": 20,
    }
    assert agent(model_settings=settings).run_sync("x").output == "x"


def test_images_are_refused(agent):
    from pydantic_ai import BinaryContent
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError, match=r"of type '(image_url|input_image)'"):
        agent().run_sync(["x", BinaryContent(b"aa", media_type="image/png")])
