"""Penalties, biases, prompt_logprobs, echo and the forms of a text, in both endpoints, by the official client."""

from __future__ import annotations

import openai
import pytest
from engine_spy import seen_requests
from fake_engine import VOCAB_SIZE, make_model_folder
from running_service import DEADLINE_S, http, served, text_of

from ringcore.params.structured_outputs import StructuredOutputsParams

ADJUSTED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "logit_bias": {"97": 2.5, "98": -100},
    "repetition_penalty": 1.2,
    "allowed_token_ids": [97, 98, 99],
    "bad_words": ["ab", "c"],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES = {"/completions": {"prompt": "ab"}, "/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
each_endpoint = pytest.mark.parametrize("path", BODIES)
streaming = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made:
        yield made


def params_of(service, path: str, **fields):
    """The sampling parameters that the engine got."""
    with seen_requests(service) as seen:
        answer = http.post(f"{service.url}/v1{path}", json=BODIES[path] | {"max_tokens": 1} | fields)
    assert answer.status_code == 200, answer.text
    (request,) = seen
    return request.sampling_params


@each_endpoint
@streaming
def test_what_adjusts_logits_reaches_the_engine(service, path, stream):
    params = params_of(service, path, **ADJUSTED, vllm_xargs={"mine": [1, "a"]}, stream=stream)
    assert {name: getattr(params, name) for name in ADJUSTED} == ADJUSTED | {"logit_bias": {97: 2.5, 98: -100}}
    assert params.extra_args == {"mine": [1, "a"]}


@each_endpoint
def test_what_is_empty_or_null_asks_for_nothing(service, path):
    nothing = {"logit_bias": {}, "bad_words": [], "vllm_xargs": {}, "prompt_logprobs": None, "structured_outputs": None}
    params = params_of(service, path, **nothing, response_format={"type": "text"}, guided_json=None, seed=1)
    assert params == params_of(service, path, seed=1)


FORMS = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"json": SCHEMA}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "description": "y", "schema": SCHEMA, "strict": True},
            }
        },
        {"json": SCHEMA},
    ),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, {"json": '{"type": "integer"}'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "[a-z]+"}}, {"regex": "[a-z]+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": "start: /[a-z]+/"}}, {"grammar": "start: /[a-z]+/"}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "start: /[a-z]+/"}, {"grammar": "start: /[a-z]+/"}),
]


@each_endpoint
@pytest.mark.parametrize(("fields", "want"), FORMS)
def test_the_form_of_a_text_reaches_the_engine(prepared, path, fields, want):
    assert prepared(path, fields).structured_outputs == StructuredOutputsParams(**want)


@pytest.fixture
def prepared(service, monkeypatch):
    """The parameters that a body becomes: the engine's workers are fakes, which know no grammars."""

    def prepare(path: str, fields: dict):
        seen = []

        def refuse(prompt, params, **_):
            seen.append(params)
            raise openai.OpenAIError

        monkeypatch.setattr(service.engine, "generate", refuse)
        monkeypatch.setattr(service.engine, "chat", refuse)
        answer = http.post(f"{service.url}/v1{path}", json=BODIES[path] | fields)
        assert seen, answer.text
        return seen[0]

    return prepare


@streaming
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo_with_logprobs(client, stream, n, prompt):
    got = client.completions.create(model=None, prompt=prompt, max_tokens=2, echo=True, logprobs=1, n=n, stream=stream)
    text = "abc" + text_of("abc", 2)
    texts, tokens, values, offsets, tops = ([[] for _ in range(n)] for _ in range(5))
    for chunk in got if stream else [got]:
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            tokens[choice.index] += choice.logprobs.tokens
            values[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
            tops[choice.index] += choice.logprobs.top_logprobs
    assert ["".join(one) for one in texts] == [text] * n
    assert tokens == [list(text)] * n
    assert values == [[None] + [-0.5] * 4] * n
    assert offsets == [list(range(5))] * n
    assert [[top and len(top) for top in one] for one in tops] == [[None, 1, 1, 1, 1]] * n


@streaming
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_prompt_alone(client, stream, logprobs):
    got = client.completions.create(
        model=None, prompt=["abc", "d"], max_tokens=0, echo=True, logprobs=logprobs, stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    chunks = list(got) if stream else [got]
    choices = sorted((choice for chunk in chunks for choice in chunk.choices), key=lambda choice: choice.index)
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("abc", "length"), ("d", "length")]
    if logprobs is not None:
        assert [choice.logprobs.tokens for choice in choices] == [["a", "b", "c"], ["d"]]
        assert [choice.logprobs.token_logprobs for choice in choices] == [[None, -0.5, -0.5], [None]]
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 0)


def test_prompt_logprobs_of_completions(service):
    body = {"prompt": ["abc", "d"], "max_tokens": 1, "prompt_logprobs": 2, "n": 2}
    answer = http.post(f"{service.url}/v1/completions", json=body).json()
    of_c = {"logprob": -0.5, "rank": 1, "decoded_token": "c"}
    for choice in answer["choices"][:2]:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert set(second) == {"98", "99"}
        assert third == {"99": of_c, "100": {"logprob": -1.5, "rank": 2, "decoded_token": "d"}}
    assert [choice["prompt_logprobs"] for choice in answer["choices"][2:]] == [[None]] * 2
    assert answer["choices"][0]["logprobs"] is None


def test_prompt_logprobs_of_chat(service):
    body = BODIES["/chat/completions"] | {"max_tokens": 1, "prompt_logprobs": 0}
    answer = http.post(f"{service.url}/v1/chat/completions", json=body).json()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert "".join(one["decoded_token"] for position in others for one in position.values()) == "ser:a;A:"
    assert (
        "prompt_logprobs"
        not in http.post(f"{service.url}/v1/chat/completions", json=body | {"prompt_logprobs": None}).json()
    )


WRONG = [
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"frequency_penalty": "x"}, "frequency_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "1 is none"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "integer"),
    ({"logit_bias": {"97": 101}}, "logit_bias", "100"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "list"),
    ({"allowed_token_ids": [5000]}, "allowed_token_ids", "vocabulary"),
    ({"bad_words": [""]}, "bad_words", "1 to 256"),
    ({"bad_words": ["a"] * 65}, "bad_words", "64"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "raise max_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "raise max_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "x" * 70_000}}}},
        "response_format",
        "65536",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"schema": {}}}, "structured_outputs", "not permitted"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1024"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured_outputs"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
]


@each_endpoint
@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
def test_what_is_wrong_is_a_400_that_names_the_field(service, path, fields, param, says):
    answer = http.post(f"{service.url}/v1{path}", json=BODIES[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 1000


def test_the_whole_vocabulary_where_the_engine_allows_it(tmp_path):
    with served(make_model_folder(tmp_path), {"max_logprobs": -1}) as service:
        chat = BODIES["/chat/completions"] | {"max_tokens": 1, "logprobs": True, "top_logprobs": -1}
        answer = http.post(f"{service.url}/v1/chat/completions", json=chat).json()
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == VOCAB_SIZE
        body = {"prompt": "ab", "max_tokens": 1, "logprobs": 25, "prompt_logprobs": -1}
        (choice,) = http.post(f"{service.url}/v1/completions", json=body).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == VOCAB_SIZE
        assert len(choice["logprobs"]["top_logprobs"][0]) == 25
