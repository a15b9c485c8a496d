"""/v1/completions, called by the official client."""

from __future__ import annotations

import openai
import pytest
from fake_engine import EOS, SLOW, expected, make_model_folder
from running_service import DEADLINE_S, served, text_of


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model")), served_model_names=("fake", "alias")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(service):
    yield
    assert service.service.concurrency.num_in_flight == 0
    assert service.engine.num_unfinished == 0


def test_one_prompt(client):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=5, temperature=0)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, text_of("ab", 5), "length")
    assert choice.logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 5, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"


def test_sixteen_tokens_unless_told(client):
    assert client.completions.create(model="alias", prompt="ab").choices[0].text == text_of("ab", 16)


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
def test_several_prompts(client, prompt):
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, n=2)
    want = [text_of("ab", 3)] * 2 + [text_of("c", 3)] * 2
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(want))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


def test_token_ids_are_one_prompt(client):
    answer = client.completions.create(model="fake", prompt=[97, 98], max_tokens=4)
    assert [c.text for c in answer.choices] == [text_of("ab", 4)]


def test_stream(client):
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=9, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == text_of("ab", 9)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_stream_of_several_prompts_and_choices(client):
    texts = [""] * 4
    for chunk in client.completions.create(model="fake", prompt=["ab", "c"], n=2, max_tokens=6, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text_of("ab", 6)] * 2 + [text_of("c", 6)] * 2


def test_stream_comes_token_by_token(client):
    prompt, chunks = [97, SLOW], []
    while len(chunks) < 2:  # a service that was held up finds all of it at once
        chunks = list(client.completions.create(model="fake", prompt=prompt, max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == bytes(expected(prompt, 4)).decode()


def test_usage_of_a_stream(client):
    chunks = list(
        client.completions.create(
            model="fake", prompt=["ab", "c"], max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 12)


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client, stream):
    full = text_of("ab", 12)
    stop = full[4:6]
    at = full.index(stop)
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=12, stop=[stop, "#"], stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(c.choices[0].text for c in chunks) == full[:at]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


def test_stop_token_ids_and_what_else_vllm_has(client):
    third = expected([97, 98], 3)[2]
    extra = {"stop_token_ids": [third], "top_k": -1, "min_p": 0.0, "min_tokens": 1, "ignore_eos": True, "priority": 1}
    extra |= {"skip_special_tokens": False, "include_stop_str_in_output": True, "cache_salt": "a"}
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=9, extra_body=extra)
    first = expected([97, 98], 9).index(third)
    assert answer.choices[0].text == text_of("ab", first + 1)
    assert answer.choices[0].stop_reason == third


def test_logprobs(client):
    text = text_of("ab", 3)
    choice = client.completions.create(model="fake", prompt="ab", max_tokens=3, logprobs=2).choices[0]
    assert choice.logprobs.tokens == list(text)
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 3
    assert all(top[letter] == -0.5 for letter, top in zip(text, choice.logprobs.top_logprobs, strict=True))


def test_logprobs_of_a_stream(client):
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=6, logprobs=0, stream=True))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    assert [t for part in parts for t in part.tokens] == list(text_of("ab", 6))
    assert [at for part in parts for at in part.text_offset] == list(range(6))


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(client, prompt, stream):
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, echo=True, n=2, stream=stream)
    texts = ["", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["ab" + text_of("ab", 3)] * 2


def test_end_of_text_tells_nothing_of_itself(client):
    extra = {"stop_token_ids": [EOS]}
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=2, seed=3, top_p=0.9, extra_body=extra)
    assert answer.choices[0].text == text_of("ab", 2)


def test_fields_without_effect_and_neutral_values(client):
    answer = client.completions.create(
        model="fake", prompt="ab", max_tokens=2, user="me", presence_penalty=0, frequency_penalty=0, logit_bias={},
        best_of=1, suffix="",
    )  # fmt: skip
    assert answer.choices[0].text == text_of("ab", 2)


def test_cached_tokens_are_told(client):
    prompt = "a prompt that is longer than two blocks"
    for _ in range(2):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt_token_ids", "empty"),
        ({"prompt": [97, 5000]}, "prompt_token_ids", "not in the vocabulary"),
        ({"prompt": [97, -1]}, "prompt_token_ids", "not in the vocabulary"),
        ({"prompt": "x" * 200}, "prompt", "max_model_len"),
        ({"prompt": {"a": 1}}, "prompt", "valid string"),
        ({"prompt": [1.5]}, "prompt", "integer"),
        ({"temperature": -1}, "temperature", "greedy"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "integer from 1"),
        ({"n": 17}, "n", "raise max_n"),
        ({"n": True}, "n", "integer"),
        ({"logprobs": 21}, "logprobs", "raise max_logprobs"),
        ({"logprobs": -1}, "logprobs", "raise max_logprobs"),
        ({"max_tokens": 0}, "max_tokens", "integer from 1"),
        ({"best_of": 2}, "best_of", "not served"),
        ({"suffix": "x"}, "suffix", "not served"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop", "valid string"),
        ({"seed": 2**63}, "seed", "to 9223372036854775807"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "not permitted"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"use_beam_search": True}, "use_beam_search", "beam search is not served"),
        ({"request_id": "x" * 300}, "request_id", "at most 256"),
        ({"cache_salt": ""}, "cache_salt", "not empty"),
        ({"priority": 2**40}, "priority", "integer from"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_field(client, fields, param, says, stream):
    body = {"model": "fake", "prompt": "ab", "stream": stream} | fields
    if "stream_options" in fields:
        body["stream"] = fields.get("stream", False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body=body, cast_to=object)
    error = caught.value
    assert error.param == param
    assert error.type == "invalid_request_error"
    assert says in error.message
    assert "Traceback" not in error.response.text


def test_one_wrong_prompt_among_good_ones(client):
    with pytest.raises(openai.BadRequestError, match=r"prompt is too long: .* max_model_len") as caught:
        client.completions.create(model="fake", prompt=["ab", "x" * 200], max_tokens=50)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="ab")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "fake, alias" in caught.value.message
