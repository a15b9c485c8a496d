"""The service does what its OpenAPI document says, whatever is sent to it."""

from __future__ import annotations

import pytest
import schemathesis
from fake_engine import make_model_folder
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from running_service import DEADLINE_S, eventually, http, served
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

ENDPOINTS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/score"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
    allow_header_conformance,
]
ANY, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
# What is sent is of the document's form, or is not; a path is always a path.
CASES = [(*endpoint, ANY) for endpoint in ENDPOINTS] + [(*one, WRONG) for one in ENDPOINTS if one[0] == "POST"]
REQUIRED = {"prompt", "messages", "tokens", "max_tokens", "input", "text_1", "text_2", "query", "documents"}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# What a body is of where the form requires no field.
FILLED = {"/v1/responses/input_tokens": {"input": "a"}}
GOOD = [
    ("POST", "/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 2, "n": 2}),
    ("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "logit_bias": {"97": 1}}),
    ("POST", "/v1/responses", {"input": "a", "max_output_tokens": 2, "text": {"format": {"type": "json_object"}}}),
    ("POST", "/v1/responses", {"input": CHAT["messages"], "max_output_tokens": 2, "store": False}),
    ("POST", "/v1/responses/input_tokens", {"input": "a"}),
    ("POST", "/v1/embeddings", {"input": ["a", "b"]}),
    ("POST", "/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"], "system": "a"}),
    ("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}),
    ("POST", "/detokenize", {"tokens": [97, 98]}),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model"))) as running:
        http.post(f"{running.url}/v1/completions", json={"prompt": "ab"}).raise_for_status()
        eventually(running.is_idle, "the first request ended")
        yield running


@pytest.fixture(scope="module")
def document(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def test_all_endpoints_are_here(document):
    found = [(one.method.upper(), one.path) for result in document.get_all_operations() for one in [result.ok()]]
    assert sorted(found) == sorted(ENDPOINTS)


@pytest.mark.parametrize(("method", "path", "body"), GOOD)
def test_good_answers_are_as_the_document_says(service, document, method, path, body):
    answer = http.request(method, service.url + path, json=body)
    assert answer.status_code == 200, answer.text
    document[path][method].validate_response(answer)


def few_fields(body: dict):
    """Of a body with all fields at once nearly always one asks for what there is not."""
    others = sorted(body.keys() - REQUIRED - {"model"})
    kept = st.lists(st.sampled_from(others), max_size=2) if others else st.just([])
    return kept.map(lambda names: {name: value for name, value in body.items() if name in (*REQUIRED, *names)})


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_all_answers_are_as_the_document_says(service, document, method, path, mode):
    operation = document[path][method]
    is_asked = method == "POST" and mode is ANY
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    @settings(
        database=None,
        derandomize=True,
        deadline=None,
        max_examples=15 if method == "POST" or "{" in path else 1,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case, data):
        if is_asked:
            asked = data.draw(few_fields(case.body))
            case.body = FILLED.get(path, {}) | {name: value for name, value in asked.items() if value is not None}
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=DEADLINE_S).status_code)

    check()
    if is_asked:
        assert 200 in statuses, "nothing that was sent came to be worked on"
    eventually(service.is_idle, "all that was begun has ended")
