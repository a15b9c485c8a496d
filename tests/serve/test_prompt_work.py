"""The work on a prompt before it is a request: whatever a client sends, the others are served."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path

import httpx
import pytest
from fake_engine import make_model_folder
from running_service import DEADLINE_S, eventually, http, served, text_of

LOOPS = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}"
TEMPLATE = "{%- set said = messages[0]['content'] -%}{%- if said == 'loop' -%}" + LOOPS + "{%- endif -%}{{ said }}"
BIG = 3_900_000  # characters, just below the largest body


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = make_model_folder(folder)
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    with served(model, {"tokenizer_timeout_s": 4.0, "max_tokenizer_queue": 3}) as running:
        yield running


def post(service, path: str, timeout: float = DEADLINE_S, **body) -> httpx.Response:
    return httpx.post(service.url + path, json=body, timeout=timeout)


def chat(service, said: str, timeout: float = DEADLINE_S) -> httpx.Response:
    return post(service, "/v1/chat/completions", timeout, messages=[{"role": "user", "content": said}], max_tokens=3)


def answer_of(response: httpx.Response) -> str:
    return response.raise_for_status().json()["choices"][0]["message"]["content"]


def num_jobs(service) -> float:
    lines = http.get(f"{service.url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("ringcore:num_tokenizer_jobs{")]
    return float(line.split()[-1])


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text[:500]
    return response.json()["error"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_longer_than_any_prompt_is_refused_by_its_length(service, path):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        hostile = [threads.submit(post, service, path, prompt="ab1!" * (BIG // 4)) for _ in range(16)]
        assert answer_of(chat(service, "hello")) == text_of("hello", 3)
        for one in hostile:
            assert "max_model_len is 128" in error_of(one.result(), 400)["message"]
    assert num_jobs(service) == 0


def test_a_long_conversation_is_refused_before_it_is_encoded(service):
    error = error_of(chat(service, "ab1!" * (BIG // 4)), 400)
    assert re.search(r"at least \d+ tokens and max_model_len is 128", error["message"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_more_messages_than_tokens_are_refused(service, path):
    error = error_of(post(service, path, messages=[{"role": "user", "content": "a"}] * 129), 400)
    assert (error["param"], "there are 129" in error["message"]) == ("messages", True)


def looping(service, num_chats, look):
    """The answers of chats whose template loops until it is too long, and what `look` gives while all of them do. On a
    machine that is stopped meanwhile they may have ended before: then all of it is done again."""
    for _ in range(5):
        with concurrent.futures.ThreadPoolExecutor(num_chats) as threads:
            chats = [threads.submit(chat, service, "loop") for _ in range(num_chats)]

            def has_ended(chats=chats) -> bool:
                return any(one.done() for one in chats)

            eventually(lambda: num_jobs(service) == num_chats or has_ended(), "the templates run")
            seen = look()
            is_seen = not has_ended()
            answers = [one.result() for one in chats]
        if is_seen:
            return answers, seen
    raise AssertionError("the templates ended before anything else was answered")


def test_a_template_that_loops_holds_up_its_own_request_alone(service):
    (refused,), other = looping(service, 1, lambda: chat(service, "hello"))
    assert answer_of(other) == text_of("hello", 3)
    error = error_of(refused, 400)
    assert "longer than 4 s" in error["message"]
    assert error["param"] == "messages"


def test_a_full_queue_answers_429(service):
    answers, refused = looping(service, 3, lambda: chat(service, "hello"))
    error = error_of(refused, 429)
    assert (error["code"], refused.headers["retry-after"]) == ("rate_limit_exceeded", "1")
    assert "max_tokenizer_queue=3" in error["message"]
    assert "ringcore:num_tokenizer_refusals_total" in http.get(f"{service.url}/metrics").text
    for one in answers:
        error_of(one, 400)


def test_what_a_client_that_left_had_asked_for_is_dropped(service):
    for _ in range(6):
        with pytest.raises(httpx.ReadTimeout):
            chat(service, "loop", timeout=0.2)
    eventually(lambda: num_jobs(service) == 0, "the work of those who left is dropped")
    assert answer_of(chat(service, "hello")) == text_of("hello", 3)


def test_token_ids_and_texts(service):
    got = post(service, "/tokenize", prompt="aé", return_token_strs=True).json()
    assert (got["tokens"], got["count"]) == ([97, 195, 169], 3)
    assert got["token_strs"][0] == "a"
    assert post(service, "/tokenize", prompt="").json()["tokens"] == []
    assert post(service, "/detokenize", tokens=[97, 195, 169]).json() == {"prompt": "aé"}
    assert error_of(post(service, "/detokenize", tokens=[97] * 129), 400)["param"] == "tokens"
