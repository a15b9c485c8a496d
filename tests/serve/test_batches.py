"""/v1/files and /v1/batches by OpenAI's client: uploads, batches to their end, and what survives the service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine import KILLS_ONCE, SLOW, make_model_folder
from running_service import DEADLINE_S, RunningService, eventually, http, served, text_of

from ringcore.openai_api.served_model import unix_seconds
from ringcore.serve.batches import queue


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(folder, tmp_path_factory):
    options = {"served_model_names": ("fake",), "max_batch_file_bytes": 20_000, "max_batch_requests_in_flight": 4}
    with served(folder, batch_dir=str(tmp_path_factory.mktemp("batches")), **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    return client_of(service)


def client_of(service: RunningService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def line(custom_id: str, prompt="ab", max_tokens: int = 3, **body) -> dict:
    body = {"model": "fake", "prompt": prompt, "max_tokens": max_tokens} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def upload(client: openai.OpenAI, lines: list) -> str:
    data = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, lines: list, **options) -> str:
    file_id = upload(client, lines)
    options = {"endpoint": "/v1/completions", "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file_id, **options).id


def ended(client: openai.OpenAI, batch_id: str):
    eventually(
        lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled", "expired"),
        "the batch has ended",
    )
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str) -> dict[str | None, dict]:
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_files(client):
    data = json.dumps(line("é")).encode() * 100
    made = client.files.create(file=("ma ny.jsonl", data), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(data), "ma ny.jsonl", "batch", "file")
    other = client.files.create(file=("other.jsonl", b"{}\n"), purpose="batch")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    listed = [one.id for one in client.files.list()]
    assert {made.id, other.id} <= set(listed)
    assert [one.id for one in client.files.list(limit=1)][:2] == listed[:2]  # page by page
    assert client.files.delete(made.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)


@pytest.mark.parametrize(
    ("endpoint", "body", "part"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}, ("output", 0, "content", 0, "text")),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, ("data", 0, "embedding")),
    ],
)
def test_a_batch_answers_as_the_endpoint_does(client, service, endpoint, body, part):
    def part_of(answer):
        for step in part:
            answer = answer[step]
        return answer

    lines = [{"custom_id": f"id-{i}", "method": "POST", "url": endpoint, "body": body} for i in range(3)]
    lines[1]["url"] = "/v1/completions"
    batch = ended(client, create(client, lines, endpoint=endpoint))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    direct = http.post(service.url + endpoint, json=body).raise_for_status().json()
    done = results(client, batch.output_file_id)
    assert {part_of(one["response"]["body"]) for one in done.values()} == {part_of(direct)}


def test_a_batch(client):
    lines = [line(f"id-{i}", "xy"[i % 2] * (i + 1)) for i in range(9)]
    lines[3] = line("wrong", temperature="hot")
    lines[5] = "{no json"
    lines[6] = line("elsewhere") | {"url": "/v1/chat/completions"}
    batch = ended(client, create(client, lines, metadata={"of": "a test"}))
    assert (batch.status, batch.endpoint, batch.metadata) == ("completed", "/v1/completions", {"of": "a test"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 6, 3)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    done = results(client, batch.output_file_id)
    assert sorted(done) == [f"id-{i}" for i in (0, 1, 2, 4, 7, 8)]
    for i in (0, 4, 7):
        body = done[f"id-{i}"]["response"]["body"]
        assert body["choices"][0]["text"] == text_of("xy"[i % 2] * (i + 1), 3)
        assert body["model"] == "fake"
    wrong = results(client, batch.error_file_id)
    assert {None if one["response"] is None else one["response"]["status_code"] for one in wrong.values()} == {
        400,
        None,
    }
    assert wrong[None]["error"]["code"] == "invalid_json_line"
    assert "give '/v1/completions'" in wrong["elsewhere"]["response"]["body"]["error"]["message"]
    assert batch.id in [one.id for one in client.batches.list()]


def test_a_batch_of_chats_that_all_succeed(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    one = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = ended(client, create(client, [one], endpoint="/v1/chat/completions"))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    answer = results(client, batch.output_file_id)["a"]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == text_of("user:hi;A:", 2)


def test_ids_that_occur_twice_fail_the_batch(client):
    batch = ended(client, create(client, [line("a"), line("b"), line("a")]))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert "a custom_id occurs twice: lines 1 and 3" in batch.errors.data[0].message


def slow_lines(num: int) -> list[dict]:
    """Each takes 4 steps of 50 ms."""
    return [line(f"id-{i}", [97 + i % 20, SLOW], 4) for i in range(num)]


def test_a_batch_that_is_cancelled_keeps_what_is_done(client):
    running, waiting = create(client, slow_lines(100)), create(client, [line("a")])
    eventually(lambda: client.batches.retrieve(running).request_counts.completed >= 2, "something is done")
    assert client.batches.retrieve(waiting).status == "validating"  # one at a time
    assert client.batches.cancel(waiting).status == "cancelling"
    with pytest.raises(openai.ConflictError):
        client.files.delete(client.batches.retrieve(running).input_file_id)
    assert client.batches.cancel(running).status == "cancelling"
    batch = ended(client, running)
    assert batch.status == "cancelled"
    assert 2 <= batch.request_counts.completed < 100
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    assert ended(client, waiting).status == "cancelled"
    assert client.batches.cancel(running).status == "cancelled"


def test_a_batch_expires_at_the_end_of_its_window(client, monkeypatch):
    """By a clock that goes on once something is done."""
    running = create(client, slow_lines(60), completion_window="2h")
    waiting = create(client, [line("a"), "{no json"], completion_window="1h")
    lasting = create(client, [line("a")], completion_window="7d")
    eventually(lambda: client.batches.retrieve(running).request_counts.completed > 0, "something is done")
    monkeypatch.setattr(queue, "unix_seconds", lambda: unix_seconds() + 7200)
    batch, counts = (made := ended(client, running)), made.request_counts
    assert (batch.status, batch.completion_window, batch.expires_at) == ("expired", "2h", batch.created_at + 7200)
    assert batch.expired_at >= batch.expires_at
    assert batch.completed_at is None
    assert (counts.total, counts.completed + counts.failed) == (60, 60)
    done, expired = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(done) == counts.completed > 0
    assert sorted({*done, *expired}) == sorted(f"id-{i}" for i in range(60))
    for one in expired.values():
        assert (one["response"], one["error"]["code"]) == (None, "batch_expired")
    batch = ended(client, waiting)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert {one["error"]["code"] for one in results(client, batch.error_file_id).values()} == {"batch_expired"}
    batch = ended(client, lasting)
    assert (batch.status, batch.expires_at, batch.expired_at) == ("completed", batch.created_at + 7 * 86_400, None)


def test_what_is_refused(client, service):
    def refused(call, *args, **options) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            call(*args, **options)
        return f"{caught.value.status_code} {caught.value.message}"

    listed = len(list(client.files.list()))
    assert "413" in refused(client.files.create, file=("big", b"x" * 30_000), purpose="batch")
    assert "purpose: give 'batch'" in refused(client.files.create, file=("x", b"x"), purpose="fine-tune")
    assert len(list(client.files.list())) == listed  # and nothing is left of them
    file_id = upload(client, [line("a")])
    for options, said in (
        ({"endpoint": "/v1/score"}, "400"),
        ({"completion_window": "0h"}, "completion_window='0h': give a time such as '24h'"),
        ({"completion_window": "a day"}, "completion_window='a day': give a time such as '24h'"),
        ({"input_file_id": "file-none"}, "404"),
        ({"input_file_id": f"../batches/{client.batches.list().data[0].id}"}, "404"),
    ):
        given = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"} | options
        assert said in refused(client.batches.create, **given)
    assert "404" in refused(client.batches.retrieve, "batch-none")
    url = f"{service.url}/v1/files"
    assert http.post(url, json={"purpose": "batch"}).status_code == 400
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert http.post(url, content=b"--y\r\nnonsense", headers=broken).json()["error"]["message"].startswith("the body")
    assert http.post(url, data={"purpose": "batch"}, files={"other": b"x"}).status_code == 400
    assert not list(Path(service.service.options.batch_dir, "files").glob("upload-*"))


def test_a_service_without_a_folder_has_none(folder, tmp_path):
    with served(folder) as plain:
        assert http.post(f"{plain.url}/v1/files").status_code == 404
        assert http.get(f"{plain.url}/v1/batches").status_code == 404
    with served(folder, batch_dir=str(tmp_path), api_keys=("key",)) as locked:
        assert http.post(f"{locked.url}/v1/files", files={"file": b"x"}).status_code == 401
        assert httpx.get(f"{locked.url}/v1/batches", headers={"Authorization": "Bearer key"}).status_code == 200


@pytest.mark.long_form
def test_a_batch_survives_the_service(folder, tmp_path):
    """Which ends in the middle of it, and begins again on the same folder."""
    options = {"batch_dir": str(tmp_path), "served_model_names": ("fake",), "max_batch_requests_in_flight": 4}
    with served(folder, **options) as running:
        client = client_of(running)
        batch_id = create(client, slow_lines(24))
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 5, "something is done")
    results_file = tmp_path / "batches" / f"{batch_id}.results"
    num_done = results_file.read_bytes().count(b"\n")
    assert 5 <= num_done < 24
    assert b'"abort"' not in results_file.read_bytes()
    before = set(results_file.read_bytes().splitlines())
    with served(folder, **options) as running:
        running.call(_started(running))
        client = client_of(running)
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 24)
        after = client.files.content(batch.output_file_id).content.splitlines()
        assert before <= set(after)  # what was done was not done again
        assert sorted(results(client, batch.output_file_id)) == sorted(f"id-{i}" for i in range(24))
    assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{batch_id}.json"]


def test_a_batch_survives_a_kill_of_the_service(folder, tmp_path):
    """The command, killed in the middle and run again: it goes on by itself."""
    with command(folder, tmp_path) as client:
        batch_id = create(client, slow_lines(16))
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 3, "something is done")
    with command(folder, tmp_path) as client:
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 16)
        assert sorted(results(client, batch.output_file_id)) == sorted(f"id-{i}" for i in range(16))


@contextmanager
def command(folder: str, batch_dir: Path) -> Iterator[openai.OpenAI]:
    """A client of `ringcore serve --batch-dir`, which is killed at the end."""
    flags = ["--load-format", "dummy", "--executor", "fake_engine:FakeMultiproc", "--max-model-len", "128"]
    flags += ["--port", "0", "--batch-dir", str(batch_dir), "--served-model-name", "fake", "--no-access-log"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ringcore.cli", "serve", folder, *flags, "--max-batch-requests-in-flight", "3"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        url = re.search(r"at (\S+)$", process.stdout.readline())[1]
        yield openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S, max_retries=0)
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_dies_is_waited_for(tmp_path):
    """A request that kills the first engine is answered by the second, and so is what was in flight with it."""
    folder = make_model_folder(tmp_path)
    lines = [line(f"id-{i}", "ab" * (i + 1)) for i in range(12)]
    lines[4] = line("killer", [97, KILLS_ONCE, 98], 6)
    options = {"served_model_names": ("fake",), "max_batch_requests_in_flight": 3}
    with served(folder, {"engine_restarts": 1}, batch_dir=str(tmp_path / "batches"), **options) as running:
        client = client_of(running)
        batch = ended(client, create(client, lines))
        assert (batch.status, batch.request_counts.completed) == ("completed", 12)
        assert (tmp_path / "has_killed").exists()
        text = results(client, batch.output_file_id)["id-11"]["response"]["body"]["choices"][0]["text"]
        assert text == text_of("ab" * 12, 3)


async def _started(running: RunningService) -> None:
    running.service_app.state.batches.start()
