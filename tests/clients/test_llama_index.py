"""LlamaIndex: OpenAILike, its agent, and its embeddings."""

from __future__ import annotations

import asyncio

import pytest
from said import BERN, CALL, JSON, City, call, weather

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]


@pytest.fixture
def model(url):
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike

    def make(**options):
        return like(model="echo", api_base=url, api_key="none", is_chat_model=True, context_window=2048, **options)

    return make


@pytest.fixture
def tool():
    return pytest.importorskip("llama_index.core.tools").FunctionTool.from_defaults(weather)


def test_chat(model):
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="system", content="brief"), ChatMessage(role="user", content="hi you")]
    assert model().chat(messages).message.content == "hi you"
    assert "".join(one.delta for one in model().stream_chat(messages)) == "hi you"
    assert model(reasoning_effort="low").complete("hi").text == "hi"


@pytest.mark.parametrize("is_required", [False, True])
def test_tools(model, tool, is_required):
    caller = model(is_function_calling_model=True)
    (found,) = caller.get_tool_calls_from_response(caller.chat_with_tools([tool], CALL, tool_required=is_required))
    assert (found.tool_name, found.tool_kwargs) == ("weather", {"city": "Bern"})
    assert caller.predict_and_call([tool], CALL).response == "rain in Bern"


def test_structured_output(model):
    from llama_index.core.prompts import PromptTemplate

    caller = model(is_function_calling_model=True)
    assert caller.as_structured_llm(City).complete(call("City")).raw == BERN
    held = model(should_use_structured_outputs=True)
    assert held.structured_predict(City, PromptTemplate("{said}"), said=JSON) == BERN


def test_an_agent(model):
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> str:
        agent = FunctionAgent(tools=[weather], llm=model(is_function_calling_model=True), system_prompt="be brief")
        return str(await agent.run("hello"))

    assert asyncio.run(run()) == "hello"


def test_embeddings(url):
    like = pytest.importorskip("llama_index.embeddings.openai_like").OpenAILikeEmbedding
    found = like(model_name="echo", api_base=url, api_key="none").get_text_embedding_batch(["a", "b"])
    assert [len(one) for one in found] == [16, 16]
