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


def test_the_page_s_calls(service):
    def ask(method: str, path: str, **options) -> httpx.Response:
        headers = {"Authorization": "Bearer a-key"}
        return httpx.request(method, service.url + path, headers=headers, timeout=DEADLINE_S, **options)

    assert get(service, "/page/defaults").status_code == 401
    defaults = ask("GET", "/page/defaults").json()
    assert (defaults["temperature"], defaults["max_tokens"], defaults["max_model_len"]) == (1.0, None, 128)
    assert httpx.post(f"{service.url}/page/markdown", json={"texts": ["a"]}, timeout=DEADLINE_S).status_code == 401
    assert ask("POST", "/page/markdown", json={"texts": ["a", "# b\nc"]}).json() == [
        [{"line": 0, "node": ["p", {}, "a"]}],
        [{"line": 0, "node": ["h3", {}, "b"]}, {"line": 1, "node": ["p", {}, "c"]}],
    ]
    for body in ({"texts": ["a" * 400_001]}, {"texts": ["a"] * 65}, {"texts": "a"}, {"texts": [1]}, {}, []):
        refused = ask("POST", "/page/markdown", json=body)
        assert refused.status_code == 400
        assert "message" in refused.json()["error"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme):
    """A contrast of at least 4.5, as WCAG 2.2 wants of text."""
    light, dark = (FOLDER / "page.css").read_text().split("prefers-color-scheme: dark")
    found = dict(re.findall(r"--([\w-]+): (#\w{6});", dark if scheme == "dark" else light))
    texts = [name for name in found if name in ("text", "muted", "accent", "bad", "warn") or name.startswith("code-")]
    assert len(texts) == 11
    for text in texts:
        for ground in ("ground", "raised", *(["soft"] if text in ("text", "muted") else [])):
            low, high = sorted(map(luminance, (found[text], found[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


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


def test_the_request_of_the_readme(service):
    (body,) = re.findall(r"^ +-d '(.*)'$", (Path(__file__).parents[2] / "README.md").read_text(), re.M)
    headers = {"Authorization": "Bearer a-key"}
    answer = httpx.post(
        f"{service.url}/v1/chat/completions", json=json.loads(body), headers=headers, timeout=DEADLINE_S
    ).json()
    assert answer["usage"]["completion_tokens"] == 32
