"""Fields beyond sampling: what becomes of unknown ones, token ids, cut prompts, continued messages, templates."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from echo_model import HERMES_MARKS, serve_echo
from echo_worker import SAID_ID, SAY_ID
from engine_spy import seen_requests
from fake_engine import make_model_folder
from running_service import http, served, text_of

from ringcore.errors import InvalidRequestError, UnknownOptionError
from ringcore.openai_api.request_fields import REQUEST_FIELDS, ExtraFields
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest
from ringcore.params.sampling_params import SamplingParams

NAMES = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())
GENERATION = {"temperature": 0.5, "top_k": 20, "max_new_tokens": 7}
PROMPT = {"prompt": "abcdef", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
CONTINUED = [*CHAT["messages"], {"role": "assistant", "content": "so far "}]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    (Path(folder) / "generation_config.json").write_text(json.dumps(GENERATION))
    with served(folder, trust_request_chat_template=True) as running:
        yield running


@pytest.fixture(scope="module")
def strict_echo(tmp_path_factory):
    with serve_echo(tmp_path_factory.mktemp("echo"), HERMES_MARKS, reasoning_parser="qwen3", strict=True) as running:
        yield running


def post(service, path: str, body: dict):
    answer = http.post(f"{service.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(service, path: str, body: dict) -> list[dict]:
    lines = http.post(f"{service.url}/v1/{path}", json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def prompt_of(service, path: str, fields: dict) -> str:
    """The prompt's text, as the engine gets it."""
    with seen_requests(service) as seen:
        post(service, path, (PROMPT if path == "completions" else CHAT) | fields)
    return bytes(token for token in seen[0].prompt_token_ids if token < 256).decode()


def refused(service, path: str, fields: dict) -> dict:
    answer = http.post(f"{service.url}/v1/{path}", json=(PROMPT if path == "completions" else CHAT) | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("schema", [CompletionRequest, ChatCompletionRequest])
def test_each_name_of_vllm_is_of_the_schema_or_explained(schema):
    ours = set(schema.model_fields)
    assert set(NAMES[schema.__name__]) - ours - set(REQUEST_FIELDS) == set()
    assert not ours & set(REQUEST_FIELDS) - {"echo"}  # which completions have


def test_unknown_fields_are_left_out_with_one_warning_a_name(service, caplog):
    caplog.set_level(logging.WARNING, "ringcore")
    for _ in range(2):
        got = post(service, "completions", PROMPT | {"tempreature": 1, "output_kind": "final", "anything": {}})
        assert got["choices"][0]["text"] == text_of("abcdef", 2)
    said = [one.getMessage() for one in caplog.records if "unknown request field" in one.getMessage()]
    assert [line.split("'")[1] for line in said] == ["tempreature", "output_kind", "anything"]
    assert "did you mean 'temperature'" in said[0]


def test_warnings_are_bounded(caplog):
    caplog.set_level(logging.WARNING, "ringcore")
    fields = ExtraFields(is_strict=False)
    fields.check({f"{'x' * 10_000}{i}": 1 for i in range(3)} | {f"\n{i}": 1 for i in range(500)}, ["seed"])
    assert len(caplog.records) == 256
    assert all(len(one.getMessage()) < 300 and "\n" not in one.getMessage() for one in caplog.records)


def test_strict_refuses_unknown_fields_and_takes_neutral_ones():
    fields = ExtraFields(is_strict=True)
    with pytest.raises(UnknownOptionError, match=r"unknown request field 'sede'; did you mean 'seed'"):
        fields.check({"sede": 1}, ["seed"])
    fields.check({"best_of": 1, "use_beam_search": False, "echo": None, "truncation_side": "left"}, ["seed"])
    with pytest.raises(InvalidRequestError, match=r"best_of: not served: it is n here") as caught:
        fields.check({"best_of": 2}, ["seed"])
    assert caught.value.details["field"] == "best_of"


def test_the_options_reach_the_service(strict_echo):
    assert refused(strict_echo, "completions", {"tempreature": 1})["param"] == "tempreature"
    assert refused(strict_echo, "chat/completions", {"chat_template": TEMPLATE})["param"] == "chat_template"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("v1/responses/input_tokens", {"input": "a"}),
        ("v1/messages", CHAT),
        ("v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("v1/embeddings", {"input": "a"}),
        ("v1/rerank", {"query": "a", "documents": ["b"]}),
        ("tokenize", {"prompt": "a"}),
        ("detokenize", {"tokens": [97]}),
    ],
)
def test_every_endpoint_does_the_same_with_other_fields(service, strict_echo, path, body):
    def status(of, fields: dict) -> int:
        return http.post(f"{of.url}/{path}", json=body | fields).status_code

    assert status(service, {"anything": {}, "mcp_servers": []}) == 200
    assert status(service, {"mcp_servers": [{"name": "a"}]}) == 400
    assert status(strict_echo, {"mcp_servers": []}) == 200
    assert status(strict_echo, {"anything": {}}) == 400


def test_token_ids_of_completions(service):
    body = PROMPT | {"n": 2, "return_token_ids": True}
    ids = list(text_of("abcdef", 2).encode())
    for choice in post(service, "completions", body)["choices"]:
        assert choice["token_ids"] == ids
        assert choice["prompt_token_ids"] == list(b"abcdef")
    chunks = [chunk["choices"][0] for chunk in events(service, "completions", body)]
    for index in (0, 1):
        mine = [choice for choice in chunks if choice["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == ids
        assert ["prompt_token_ids" in choice for choice in mine] == [True] + [False] * (len(mine) - 1)
    assert "token_ids" not in post(service, "completions", PROMPT)["choices"][0]


def test_token_ids_of_chat(service):
    whole = post(service, "chat/completions", CHAT | {"return_token_ids": True})
    (choice,) = whole["choices"]
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    chunks = events(service, "chat/completions", CHAT | {"return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])] == choice["token_ids"]


@pytest.mark.parametrize(
    ("fields", "kept"), [({"truncate_prompt_tokens": 2}, "ef"), ({"truncate_prompt_tokens": 9}, "abcdef")]
)
@pytest.mark.parametrize("prompt", ["abcdef", list(b"abcdef")])
def test_a_cut_prompt(service, fields, kept, prompt):
    assert prompt_of(service, "completions", fields | {"prompt": prompt}) == kept
    got = post(service, "completions", PROMPT | fields | {"prompt": prompt, "echo": True})
    assert got["choices"][0]["text"] == kept + text_of(kept, 2)


def test_a_prompt_cut_to_what_fits(service):
    assert prompt_of(service, "completions", {"prompt": "x" * 500, "truncate_prompt_tokens": -1}) == "x" * 126
    long = {"messages": [{"role": "user", "content": "x" * 500}], "truncate_prompt_tokens": 5}
    assert len(prompt_of(service, "chat/completions", long)) == 5
    assert "max_model_len" in refused(service, "completions", {"prompt": "x" * 500})["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_models_defaults(service, path):
    prompt = {"prompt": "ab"} if path == "completions" else {"messages": CHAT["messages"]}
    with seen_requests(service) as seen:
        post(service, path, prompt | {"top_p": None, "temperature": None})
        post(service, path, prompt | {"temperature": 0, "top_k": 0, "max_tokens": 2})
    got = [(one.temperature, one.top_k, one.max_tokens) for one in (request.sampling_params for request in seen)]
    assert got == [(0.5, 20, 7), (0, 0, 2)]
    assert service.engine.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=20, max_tokens=7)


def test_tokens_are_counted(service):
    before = service.engine.totals()
    post(service, "completions", PROMPT | {"n": 2})
    after = service.engine.totals()
    assert (after.prompt_tokens - before.prompt_tokens, after.generation_tokens - before.generation_tokens) == (6, 4)
    assert after.num_blocks == service.engine.ready.num_blocks


def test_a_request_id(service):
    assert post(service, "completions", PROMPT | {"request_id": "mine"})["id"] == "cmpl-mine"
    assert post(service, "chat/completions", CHAT | {"request_id": "mine"})["id"] == "chatcmpl-mine"


def test_a_continued_message(service):
    got = prompt_of(service, "chat/completions", OPEN | {"messages": CONTINUED})
    assert got.endswith("so far ")
    assert "end-of-the-final" not in got
    assert refused(service, "chat/completions", {"messages": CONTINUED, "continue_final_message": True})["param"] == (
        "continue_final_message"
    )
    empty = [*CHAT["messages"], {"role": "assistant", "content": ""}]
    assert "content" in refused(service, "chat/completions", OPEN | {"messages": empty})["message"]
    hidden = OPEN | {"messages": CONTINUED, "chat_template": "x"}
    assert "does not write" in refused(service, "chat/completions", hidden)["message"]


def test_a_template_of_the_request(service):
    assert prompt_of(service, "chat/completions", {"chat_template": TEMPLATE}) == "[a]"
    assert refused(service, "chat/completions", {"chat_template": "{% for %}"})["param"] == "chat_template"
    documents = {"chat_template": "{{ documents[0].text }}", "documents": [{"text": "read this"}]}
    assert prompt_of(service, "chat/completions", documents) == "read this"
    effort = {"chat_template": "{{ reasoning_effort }}{{ enable_thinking }}", "reasoning_effort": "none"}
    assert prompt_of(service, "chat/completions", effort) == "noneFalse"


def test_reasoning_is_left_out(strict_echo):
    said = {"messages": [{"role": "user", "content": "why</think>because"}], "max_tokens": 40}
    said |= {"chat_template_kwargs": {"thinking": True}}
    assert post(strict_echo, "chat/completions", said)["choices"][0]["message"]["reasoning_content"] == "why"
    message = post(strict_echo, "chat/completions", said | {"include_reasoning": False})["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == ("because", False)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(strict_echo, "chat/completions", said)]
    assert any("reasoning_content" in delta for delta in deltas)
    shown = events(strict_echo, "chat/completions", said | {"include_reasoning": False})
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in shown)


def test_a_stream_that_begins_within_a_character_counts_its_prompt_once(strict_echo):
    body = {"prompt": [SAY_ID, *"🙂".encode(), SAID_ID], "max_tokens": 20, "stream_options": {"include_usage": True}}
    *chunks, last = events(strict_echo, "completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "🙂"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 5)
