"""LangChain: ChatOpenAI over chat completions and over responses, ChatAnthropic, and embeddings."""

from __future__ import annotations

import pytest
from said import BERN, CALL, IMAGE, JSON, REASONED, REASONED_CALL, City, call, weather

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request, service, url):
    if request.param == "anthropic":
        chat = pytest.importorskip("langchain_anthropic").ChatAnthropic
        return chat(model="echo", base_url=service.url, api_key="none", max_tokens=1024)
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    asked = {"use_responses_api": request.param == "responses", "stream_usage": True}
    return chat(model="echo", base_url=url, api_key="none", **asked)


def added(chunks):
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def test_chat(model):
    for answer in (model.invoke("hi you"), added(model.stream("hi you"))):
        assert answer.text == "hi you"
        assert answer.usage_metadata["output_tokens"] == len("hi you") + 1
    assert [answer.text for answer in model.batch(["a", "b"])] == ["a", "b"]


@pytest.mark.parametrize("choice", [None, "auto", "any", "weather"])
def test_tools(model, choice):
    bound = model.bind_tools([weather], **({} if choice is None else {"tool_choice": choice}))
    for answer in (bound.invoke(CALL), added(bound.stream(CALL))):
        assert [(one["name"], one["args"]) for one in answer.tool_calls] == [("weather", {"city": "Bern"})]


def test_a_result_is_sent_back(model):
    from langchain_core.messages import HumanMessage, ToolMessage

    asked = [HumanMessage(REASONED_CALL)]
    answer = added(model.bind_tools([weather]).stream(asked))
    result = ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])
    assert model.invoke([*asked, answer, result, HumanMessage("thanks")]).text == "thanks"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model, method):
    if method == "json_mode" and "Anthropic" in type(model).__name__:
        pytest.skip("it has no such method")
    said = call("City") if method == "function_calling" else JSON
    assert model.with_structured_output(City, method=method).invoke(said) == BERN


def test_reasoning(model, url):
    from langchain_openai import ChatOpenAI

    blocks = model.invoke(REASONED).content_blocks
    assert blocks[-1]["text"] == "yes"
    summed = ChatOpenAI(model="echo", base_url=url, api_key="none", reasoning={"effort": "minimal", "summary": "auto"})
    assert summed.invoke(REASONED).text == "yes"


def test_images_are_refused(model):
    from langchain_core.messages import HumanMessage

    with pytest.raises(Exception, match=r"of type '(image_url|input_image|image)'"):
        model.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": IMAGE}}])])


def test_a_stored_conversation(url):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    from langchain_core.messages import HumanMessage

    model = chat(model="echo", base_url=url, api_key="none", use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("a")
    assert model.invoke([HumanMessage("a"), first, HumanMessage("b")]).text == "b"


def test_embeddings_and_completions(url):
    library = pytest.importorskip("langchain_openai")
    found = library.OpenAIEmbeddings(model="echo", base_url=url, api_key="none", check_embedding_ctx_length=False)
    assert [len(one) for one in found.embed_documents(["a", "b"])] == [16, 16]
    assert len(library.OpenAI(model="echo", base_url=url, api_key="none", max_tokens=5).invoke("hi")) == 5
