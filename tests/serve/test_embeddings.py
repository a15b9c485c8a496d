"""/v1/embeddings by the official client, /v1/score and /v1/rerank; the fake worker's states tell a prompt's tokens."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
from fake_engine import make_model_folder
from running_service import DEADLINE_S, http, served

from ringcore.testing.fake_prompts import POOLED_SIZE

MAX_CONCURRENT = 8


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    with served(folder, max_concurrent_requests=MAX_CONCURRENT) as running:
        yield running


def mean_of(text: str) -> np.ndarray:
    counts = np.bincount(np.array(list(text.encode())) % POOLED_SIZE, minlength=POOLED_SIZE)
    return counts / len(text)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_embeddings(service, form):
    """The client asks for base64 unless told, and decodes it."""
    asked = {} if form is None else {"encoding_format": form}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        texts = ["abc", "aab"]
        got = client.embeddings.create(model=None, input=texts, extra_body={"pooling": "mean"}, **asked)
        assert (got.object, got.model) == ("list", service.service.model_names[0])
        assert (got.usage.prompt_tokens, got.usage.total_tokens) == (6, 6)
        for i, (one, text) in enumerate(zip(got.data, texts, strict=True)):
            assert (one.index, one.object) == (i, "embedding")
            vector = one.embedding
            if form == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            assert vector == pytest.approx(unit(mean_of(text)), abs=1e-6)


@pytest.mark.parametrize("given", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_the_last_token_of_texts_and_token_ids(service, given):
    answer = http.post(f"{service.url}/v1/embeddings", json={"input": given, "normalize": False})
    (one,) = answer.json()["data"]
    assert one["embedding"] == np.eye(POOLED_SIZE)[ord("c") % POOLED_SIZE].tolist()


@pytest.mark.parametrize("given", ["aaa", ["aaa", "bcd"]])
def test_scores(service, given):
    body = {"text_1": given, "text_2": ["aab", "bbb"], "pooling": "mean"}
    answer = http.post(f"{service.url}/v1/score", json=body).json()
    firsts = ["aaa", "aaa"] if given == "aaa" else given
    expected = [unit(mean_of(a)) @ unit(mean_of(b)) for a, b in zip(firsts, body["text_2"], strict=True)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 3 * (2 + (1 if given == "aaa" else 2))


def test_a_ranking(service):
    body = {"query": "aab", "documents": ["ccc", "aab", "abb"], "pooling": "mean"}
    results = http.post(f"{service.url}/v1/rerank", json=body).json()["results"]
    assert [(one["index"], one["document"]["text"]) for one in results] == [(1, "aab"), (2, "abb"), (0, "ccc")]
    assert results[0]["relevance_score"] == pytest.approx(1)
    scored = http.post(f"{service.url}/v1/rerank", json=body | {"return_documents": False}).json()["results"]
    assert scored == [{name: one[name] for name in ("index", "relevance_score")} for one in results]
    top = http.post(f"{service.url}/v1/rerank", json=body | {"top_n": 2}).json()["results"]
    assert top == results[:2]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("embeddings", {"input": ""}, "input", "empty"),
        ("embeddings", {"input": []}, "input", "empty"),
        ("embeddings", {"input": ["a", ""]}, "input", "empty"),
        ("embeddings", {"input": "x" * 500}, "input", "max_model_len"),
        ("embeddings", {"input": [[10**6]]}, "input", "vocabulary"),
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions", "None"),
        ("embeddings", {"input": "a", "pooling": "max"}, "pooling", "'mean'"),
        ("embeddings", {"input": ["a"] * (MAX_CONCURRENT + 1)}, "prompt", "max_concurrent_requests"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many"),
        ("score", {"text_1": "a", "text_2": []}, "text_2", "1"),
        ("rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "empty"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "1"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(service, path, body, param, says):
    answer = http.post(f"{service.url}/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert says in answer.json()["error"]["message"]
