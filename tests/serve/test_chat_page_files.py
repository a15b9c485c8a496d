"""The chat page's files as they are served, and the usage that it reads while an answer is under way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from fake_engine import make_model_folder
from running_service import DEADLINE_S, served

import ringcore.serve.chat_page as chat_page

FOLDER = Path(chat_page.__file__).parent / "page"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model")), api_keys=("a-key",)) as running:
        yield running


def get(service, path: str) -> httpx.Response:
    return httpx.get(service.url + path, timeout=DEADLINE_S)


@pytest.mark.parametrize("path", sorted(chat_page.PAGE_PATHS))
def test_a_file(service, path):
    answer = get(service, path)
    assert answer.status_code == 200  # without a key
    assert answer.content == (FOLDER / ("index.html" if path == "/" else Path(path).name)).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_all_files_are_served_and_nothing_else(service):
    names = {Path(path).name or "index.html" for path in chat_page.PAGE_PATHS}
    assert names == {file.name for file in FOLDER.iterdir()}
    for path in ("/page/", "/page/other.js", "/page/..%2fchat_page.py", "/page/../chat_page.py"):
        assert get(service, path).status_code == 401


def test_what_the_files_name_is_there():
    named = {"/" + name for name in re.findall(r'(?:href|src)="([^"]+)"', (FOLDER / "index.html").read_text())}
    imported = {
        "/page/" + name for file in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', file.read_text())
    }
    assert "/page/page.css" in named
    assert imported
    assert named | imported <= chat_page.PAGE_PATHS


def test_no_text_is_parsed_as_html():
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function"
    for file in FOLDER.glob("*.js"):
        assert re.findall(forbidden, file.read_text()) == [], file.name


def test_the_page_is_not_of_the_interface(service):
    document = httpx.get(f"{service.url}/openapi.json", headers={"Authorization": "Bearer a-key"}, timeout=DEADLINE_S)
    assert chat_page.PAGE_PATHS.isdisjoint(document.json()["paths"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_continuous", [False, True])
def test_usage_in_every_chunk(service, path, is_continuous):
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    prompt = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    answer = httpx.post(
        service.url + path,
        json={"max_tokens": 6, "stream": True, "stream_options": options} | prompt,
        headers={"Authorization": "Bearer a-key"},
        timeout=DEADLINE_S,
    )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    *usages, last = [event["usage"] for event in events]
    assert last["completion_tokens"] == 6
    if not is_continuous:
        assert set(map(str, usages)) == {"None"}
        return
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 6)
    assert {usage["prompt_tokens"] for usage in usages} == {last["prompt_tokens"]}
