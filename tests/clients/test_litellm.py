"""litellm, by its providers for OpenAI's API, for vLLM and for Anthropic's API."""

from __future__ import annotations

import pytest
from said import BERN, CALL, CHOICES, IMAGE, JSON, REASONED, TOOL, City, user

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]

PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


@pytest.fixture(scope="module")
def litellm(monkeypatch_module):
    monkeypatch_module.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the other one is on another host
    return pytest.importorskip("litellm")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def complete(litellm, service, url):
    def ask(text: str, provider: str = "openai", **fields):
        base = service.url if provider == "anthropic" else url
        given = {"model": f"{provider}/echo", "api_base": base, "api_key": "none", "messages": user(text)}
        return litellm.completion(**given | fields)

    return ask


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chat(litellm, complete, provider):
    assert complete("hi", provider).choices[0].message.content == "hi"
    chunks = list(complete("hi you", provider, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "hi you"
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == len("hi you") + 1


@pytest.mark.parametrize("effort", ["minimal", "low", "high"])
def test_reasoning_effort(complete, effort):
    for provider in ("openai", "hosted_vllm"):
        allowed = {"allowed_openai_params": ["reasoning_effort"]} if provider == "openai" else {}
        message = complete(REASONED, provider, reasoning_effort=effort, **allowed).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "yes")
    deltas = [one.choices[0].delta for one in complete(REASONED, "hosted_vllm", reasoning_effort=effort, stream=True)]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas) == "hm"


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
def test_tools(litellm, complete, provider, choice):
    options = {"tools": [TOOL], "tool_choice": choice}
    streamed = litellm.stream_chunk_builder(list(complete(CALL, provider, stream=True, **options)))
    for answer in (complete(CALL, provider, **options), streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, City.model_validate_json(call.function.arguments)) == ("weather", BERN)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_schema(complete):
    assert complete(JSON, response_format=City).choices[0].message.content == JSON


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(litellm, url, provider):
    found = litellm.embedding(model=f"{provider}/echo", input=["a", "b"], api_base=url, api_key="none")
    assert [len(one["embedding"]) for one in found.data] == [16, 16]


def test_rankings(litellm, url):
    found = litellm.rerank(model="hosted_vllm/echo", api_base=url, query="a", documents=["b", "a"], top_n=1)
    assert [one["index"] for one in found.results] == [1]


def test_other_endpoints(litellm, url):
    given = {"api_base": url, "api_key": "none"}
    text = litellm.text_completion(model="text-completion-openai/echo", prompt="a", max_tokens=5, **given)
    assert len(text.choices[0].text) == 5
    response = litellm.responses(model="openai/echo", input="hi", reasoning={"effort": "low"}, **given)
    assert response.output[0].content[0].text == "hi"
    *_, last = litellm.responses(model="openai/echo", input="hi", stream=True, **given)
    assert last.type == "response.completed"


def test_errors(litellm, complete):
    with pytest.raises(litellm.ContextWindowExceededError):
        complete("x" * 3000)
    with pytest.raises(litellm.NotFoundError):
        complete("a", model="openai/another")
    with pytest.raises(litellm.BadRequestError, match="image_url"):
        complete("", messages=user([{"type": "image_url", "image_url": {"url": IMAGE}}]))
