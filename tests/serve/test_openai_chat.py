"""/v1/chat/completions and /v1/models, called by the official client, synchronous and not."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_engine import make_model_folder
from running_service import DEADLINE_S, served, text_of

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
WRITTEN = "system:be brief;user:hi;A:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(folder):
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made:
        yield made


def test_an_answer(client, folder):
    answer = client.chat.completions.create(model=folder, messages=MESSAGES, max_completion_tokens=7, max_tokens=99)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        text_of(WRITTEN, 7),
        "length",
    )
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(WRITTEN), 7)
    assert answer.object == "chat.completion"
    assert answer.model == folder


def test_as_long_as_there_is_room_unless_told(client, folder):
    answer = client.chat.completions.create(model=folder, messages=MESSAGES)
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


def test_n_and_content_in_parts(client, folder):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.chat.completions.create(
        model=folder, messages=[{"role": "user", "content": parts}], n=3, max_tokens=4, seed=1, temperature=0.5
    )
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, text_of("user:a\nb;A:", 4)) for i in range(3)]


def test_stream(client, folder):
    chunks = list(
        client.chat.completions.create(
            model=folder, messages=MESSAGES, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(c.choices[0].delta.content for c in middle) == text_of(WRITTEN, 6)
    assert all(c.choices[0].finish_reason is None and c.choices[0].delta.role is None for c in middle)
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (len(WRITTEN), 6)
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1


def test_stream_of_several_choices(client, folder):
    texts, ends = ["", ""], []
    for chunk in client.chat.completions.create(model=folder, messages=MESSAGES, n=2, max_tokens=5, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [text_of(WRITTEN, 5)] * 2
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client, folder, stream):
    full = text_of(WRITTEN, 12)
    stop = full[5:7]
    answer = client.chat.completions.create(model=folder, messages=MESSAGES, max_tokens=12, stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (full[: full.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, folder, stream):
    answer = client.chat.completions.create(
        model=folder, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    text = text_of(WRITTEN, 4)
    assert [t.token for t in tokens] == list(text)
    assert [bytes(t.bytes) for t in tokens] == [letter.encode() for letter in text]
    assert all(t.logprob == -0.5 and [top.logprob for top in t.top_logprobs] == [-0.5, -1.5] for t in tokens)


def test_logprobs_without_the_likeliest(client, folder):
    answer = client.chat.completions.create(model=folder, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert [t.top_logprobs for t in answer.choices[0].logprobs.content] == [[], []]


def test_template_options(client, folder):
    answer = client.chat.completions.create(
        model=folder,
        messages=MESSAGES,
        max_tokens=3,
        extra_body={"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.content == text_of(WRITTEN.removesuffix("A:"), 3)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": ["hi"]}, "messages[0]", "valid dictionary"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "give a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "'text'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "call format of this model is unknown"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "raise max_logprobs"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"n": 99}, "n", "raise max_n"),
        ({"max_tokens": "many"}, "max_tokens", "integer"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_field(client, fields, param, says, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": MESSAGES, "stream": stream} | fields, cast_to=object)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert says in caught.value.message


def test_what_asks_for_nothing_is_taken(client, folder):
    answer = client.chat.completions.create(
        model=folder,
        messages=MESSAGES,
        max_tokens=2,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        store=False,
        metadata={"a": "b"},
    )
    assert answer.choices[0].message.content == text_of(WRITTEN, 2)


def test_models(client, folder):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == (folder, "model", "ringcore", 128)
    assert client.models.retrieve(folder).id == folder  # its name has slashes
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.models.retrieve("other")


def test_the_asynchronous_client(service, folder):
    async def stream(client: openai.AsyncOpenAI, text: str) -> str:
        got = ""
        async with await client.chat.completions.create(
            model=folder, messages=[{"role": "user", "content": text}], max_tokens=20, stream=True
        ) as chunks:
            async for chunk in chunks:
                got += chunk.choices[0].delta.content or ""
        return got

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=DEADLINE_S) as client:
            texts = [f"question {i}" for i in range(20)]
            answers = await asyncio.gather(*(stream(client, text) for text in texts))
            assert answers == [text_of(f"user:{text};A:", 20) for text in texts]
            whole = await client.completions.create(model=folder, prompt="ab", max_tokens=3)
            assert whole.choices[0].text == text_of("ab", 3)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=folder, prompt="")

    asyncio.run(main())
