"""`ringcore trace` of an engine whose workers are processes, and serve meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from admin_peers import ANY_PORT, make_keys
from check_timeline import check_timeline
from fake_engine import make_model_folder
from typer.testing import CliRunner

from ringcore import AdminClient, AsyncEngine, EngineConfig, SamplingParams
from ringcore.cli.app import make_app
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.front_end import engine_trace, local_engines
from ringcore.front_end.client import EngineCoreClient
from ringcore.tracing import kinds

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "observability.md"
NUM_READERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "smollm2-135m"  # the documents' name for it
    folder.mkdir()
    return make_model_folder(folder)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


class Serving:
    """An engine in a thread of its own, with readers that ask for one completion after the other."""

    def __init__(self, folder, keys) -> None:
        self._folder, self._keys = folder, keys
        self._ready, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.endpoint, self.pid = "", 0

    async def _run(self) -> None:
        options = {"admin_endpoint": ANY_PORT, "admin_keys": self._keys, "tensor_parallel_size": 2}
        async with AsyncEngine(
            self._folder, load_format="dummy", max_model_len=64, executor="fake_engine:FakeMultiproc", **options
        ) as engine:
            self.endpoint, self.pid = engine.ready.admin_endpoint, engine.ready.pids["engine"]
            self._ready.set()
            await asyncio.gather(*(self._read(engine) for _ in range(NUM_READERS)))

    async def _read(self, engine: AsyncEngine) -> None:
        while not self._ends.is_set():
            async for _ in engine.generate("abc", SamplingParams(max_tokens=20)):
                await asyncio.sleep(0.002)  # a reader that leaves the processor to the engine

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exc) -> None:
        self._ends.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def serving(folder, keys):
    with Serving(folder, keys) as made:
        yield made


def run(*args):
    return CliRunner().invoke(make_app(args), list(args), catch_exceptions=False)


def events_of(file, ph, name=None):
    return [one for one in file["traceEvents"] if one["ph"] == ph and name in (None, one["name"])]


@pytest.fixture(scope="module")
def file(serving, keys, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    result = run("trace", serving.endpoint, "--keys", keys, "--seconds", "0.5", "--output", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{path}: ")
    made = json.loads(gzip.decompress(path.read_bytes()))
    check_timeline(made)
    return made


def test_one_timeline_of_every_process(file):
    assert file["otherData"]["notes"] == []
    processes = [one["args"]["name"].split(" (")[0] for one in events_of(file, "M", "process_name")]
    assert processes == ["front end", "engine", "worker 0", "worker 1", "requests"]
    found = Counter(one["name"] for one in events_of(file, "X"))
    assert {
        "tokenize", "submit", "read outputs", "process outputs", "wake readers",
        "receive", "schedule", "broadcast", "enqueue", "update", "send",
        "wait for a call", "receive call", "launch", "result", "reply",
    } <= set(found)  # fmt: skip
    assert len(events_of(file, "C", "call ring: unread bytes")) == found["enqueue"]


def test_the_steps_are_linked_over_the_processes(file):
    by_step = {}
    for name in ("schedule", "broadcast", "launch", "update"):
        for one in events_of(file, "X", name):
            by_step.setdefault(one["args"]["step"], {}).setdefault(name, []).append(one["ts"])
    whole = [one for one in by_step.values() if len(one) == 4 and len(one["launch"]) == 2]
    assert len(whole) > 0.8 * len(by_step) > 8  # but for those at both ends
    for one in whole:  # one clock: a step is launched after it was broadcast, and updated after that
        assert one["schedule"][0] < one["broadcast"][0] < min(one["launch"]) < one["update"][0]
    compositions = [one["args"] for one in events_of(file, "X", "launch")]
    assert max(one["decoding_rows"] for one in compositions) == NUM_READERS
    assert max(one["new_requests"] for one in compositions) >= 1
    assert all(one["lag_us"] > 0 for one in compositions if "lag_us" in one)


def test_the_requests_are_linked_over_the_processes(file):
    linked = Counter(one["id"] for ph in "stf" for one in events_of(file, ph, "request"))
    assert max(linked.values()) == 5  # submit, receive, schedule, update, process outputs
    requests = [one for one in events_of(file, "b", "request") if one["args"].get("reason") == "length"]
    assert requests
    assert all(one["args"]["prompt_tokens"] == 3 for one in requests)


def test_one_trace_at_a_time(serving, keys):
    with AdminClient(serving.endpoint, keys) as client:
        client.call_engine("start_trace", (30.0,))
        with pytest.raises(InvalidRequestError, match="another trace is recorded, for "):
            client.call_engine("start_trace", (1.0,))
        assert len(client.call_engine("stop_trace")) > 100
        client.call_engine("start_trace", (0.001,))
        time.sleep(0.002)
        client.call_engine("start_trace", (30.0,))  # the one before is over
        client.call_engine("stop_trace")


def test_an_interrupt_ends_it_earlier(serving, keys, tmp_path, monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "trace.json"
    monkeypatch.setattr(engine_trace.record_timeline, "__defaults__", (False, interrupt))
    result = run("trace", serving.endpoint, "--keys", keys, "--seconds", "600", "--output", str(path))
    assert result.exit_code == 0
    assert "ringcore: interrupted: it was to take 600.0 s" in result.stderr
    check_timeline(json.loads(path.read_text()))


@pytest.mark.parametrize("seconds", ["0", "-1", "601", "nan"])
def test_seconds_that_cannot_be(serving, keys, seconds):
    with pytest.raises(InvalidRequestError, match="seconds="):
        run("trace", serving.endpoint, "--keys", keys, "--seconds", seconds)


def test_a_front_end_that_does_not_read_is_left_out(folder, keys, monkeypatch):
    """One that has nothing to wait for: the file has the others, and says so. Its late answer is no one's."""
    monkeypatch.setattr(engine_trace, "_FRONT_END_S", 0.1)
    options = {"admin_endpoint": ANY_PORT, "admin_keys": keys, "executor": "ringcore.testing:FakeExecutor"}
    config = EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=64, **options)
    with EngineCoreClient(config) as idle, AdminClient(idle.ready.admin_endpoint, keys) as client:
        file = engine_trace.record_timeline(client, 0.01)
        check_timeline(file)
        processes = [one["args"]["name"].split(" (")[0] for one in events_of(file, "M", "process_name")]
        assert processes == ["engine", "worker 0", "requests"]
        assert [note.split(";")[0] for note in file["otherData"]["notes"]] == ["front end: left out"]
        assert idle.health().state == "ready"
        file = engine_trace.record_timeline(idle, 0.01)  # by the front end itself, which then reads
        check_timeline(file)
        assert file["otherData"]["notes"] == []


def test_the_page_has_every_kind_of_span():
    text = PAGE.read_text()
    names = {kind.name for chain in kinds.CHAINS for kind in chain.kinds if kind} | {
        kinds.TOKENIZE.name,
        kinds.SUBMIT.name,
    }
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_command_of_the_page(serving, keys, tmp_path, monkeypatch):
    """As typed, on a host with this engine alone; over TCP at its own port."""
    alone = [one for one in local_engines.local_engines() if one.pid == serving.pid]
    monkeypatch.setattr(local_engines, "local_engines", lambda: alone)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_trace.record_timeline, "__defaults__", (False, lambda seconds: None))
    commands = [line.strip() for line in PAGE.read_text().splitlines() if line.strip().startswith("ringcore trace")]
    assert len(commands) == 4
    (tmp_path / "admin-keys").symlink_to(keys)
    for command in commands:
        words = shlex.split(command.replace("tcp://127.0.0.1:5600", serving.endpoint))[1:]
        assert run(*words).exit_code == 0
    assert {path.name for path in tmp_path.glob("*.json.gz")} == {"trace.json.gz", "step.json.gz"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--keys", "./keys"], "only tcp://HOST:PORT needs keys"),
        (["tcp://127.0.0.1:1"], "give the keys of tcp://127.0.0.1:1"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_an_engine_that_cannot_be_meant(serving, words, says):
    with pytest.raises(InvalidRequestError, match=says):
        run("trace", *words)


def test_where_no_file_can_be(serving, keys):
    with pytest.raises(ConfigError, match="in a directory that you may write to"):
        run("trace", serving.endpoint, "--keys", keys, "--output", "/no/such/folder/trace.json")
