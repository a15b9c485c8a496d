"""Lines that are wrong, requests that kill engines, jobs that cannot run: each costs what it must and nothing more."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from batch_command import FAKE, INSTANT, ends, plain_lines, read_results, start, write_lines
from fake_engine import KILLS, KILLS_ONCE, FakeMultiproc, FakeUniproc, expected, make_model_folder

from ringcore import batch
from ringcore.batch.figures import Figures
from ringcore.batch.journal import Record
from ringcore.batch.lines import InputLine, Outcome
from ringcore.batch.replica import Replica
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError, UnknownOptionError
from ringcore.testing import FakeExecutor

ENGINE = {"load_format": "dummy", "max_model_len": 64, "use_tqdm": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


def completion(custom_id: str, prompt="ab", **body) -> dict:
    body = {"prompt": prompt, "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


OPENAI_LINES = [
    completion("good"),
    {**completion("chat"), "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}},
    completion("two", ["ab", "c"], n=1),
    completion("model", model="another"),
    completion("field", temprature=1),
    completion("type", temperature="hot"),
    completion("long", "x" * 500),
    completion("streamed", stream=True),
    {**completion("embedded"), "url": "/v1/embeddings", "body": {"input": ["x", "yz"]}},
    {**completion("answered"), "url": "/v1/responses", "body": {"input": "x", "max_output_tokens": 4}},
    {**completion("reply"), "url": "/v1/responses", "body": {"input": "x", "previous_response_id": "resp_1"}},
    {**completion("events"), "url": "/v1/responses", "body": {"input": "x", "stream": True}},
    {**completion("scored"), "url": "/v1/score", "body": {"text_1": "x", "text_2": "y"}},
    {**completion("elsewhere"), "url": "/v1/other"},
    {**completion("got"), "method": "GET"},
    "{not json",
    "",
    {"custom_id": "bare", "method": "POST"},
    completion("y" * 2000),
    completion("last", "zz"),
]
WRONG = {
    "model": (404, "model", "is not served"),
    "field": (400, "temprature", "did you mean 'temperature'"),
    "type": (400, "temperature", "valid number"),
    "long": (400, "prompt", "max_model_len"),
    "streamed": (400, "stream", "not in a batch"),
    "reply": (404, "previous_response_id", "is not stored"),
    "events": (400, "stream", "not in a batch"),
    "scored": (400, "url", "'/v1/embeddings'"),
    "elsewhere": (400, "url", "/v1/chat/completions"),
    "got": (400, "method", "POST"),
}


def test_wrong_lines_of_openai(folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", OPENAI_LINES)
    out = tmp_path / "out.jsonl"
    summary = batch.run(source, out, folder, executor=FakeMultiproc, max_line_bytes=1000, order="input", **ENGINE)
    results = read_results(out.read_bytes())
    by_id = {result["custom_id"]: result for result in results if result["custom_id"]}
    for name, (status, param, said) in WRONG.items():
        response = by_id[name]["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param), response
        assert said in response["body"]["error"]["message"]
        assert by_id[name]["error"] is None
    codes = {(r["custom_id"], r["error"]["code"]): r["error"]["message"] for r in results if r["error"]}
    assert codes.keys() == {(None, "invalid_json_line"), ("bare", "invalid_line"), (None, "line_too_long")}
    assert "line 16 is no JSON" in codes[None, "invalid_json_line"]
    good = by_id["good"]["response"]["body"]
    assert good["choices"][0]["text"] == text_of("ab", 3)
    assert (good["object"], good["usage"]["completion_tokens"], good["model"]) == ("text_completion", 3, folder)
    two = by_id["two"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in two] == [text_of("ab", 3), text_of("c", 3)]
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    embedded = by_id["embedded"]["response"]["body"]
    assert [len(one["embedding"]) for one in embedded["data"]] == [16] * 2
    answered = by_id["answered"]["response"]["body"]
    assert answered["output"][0]["content"][0]["text"] == text_of("user:x;A:", 4)
    assert (answered["status"], answered["store"], answered["usage"]["output_tokens"]) == ("incomplete", False, 4)
    assert [r["custom_id"] for r in results][-1] == "last"
    assert len({r["id"] for r in results}) == len(results) == 19
    assert (summary.num_requests, summary.num_done, summary.num_failed, summary.exit_code) == (19, 19, 13, 1)


PLAIN_LINES = [
    {"prompt": "ab", "max_tokens": 3},
    {"prompt_token_ids": [97, 98], "max_tokens": 3, "custom_id": 77, "n": 2, "logprobs": 1},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "custom_id": "chat"},
    {"prompt": "ab", "messages": []},
    {"prompt": "ab", "max_token": 3},
    {"prompt": "ab", "temperature": -1},
    {"prompt": "ab", "tools": []},
    [1, 2],
    {"prompt": "ab", "structured_outputs": {"regexp": "a"}},
]


def test_wrong_plain_lines(folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", PLAIN_LINES)
    out = tmp_path / "out.jsonl"
    summary = batch.run(
        source,
        out,
        folder,
        executor=FakeMultiproc,
        order="input",
        sampling={"max_tokens": 5, "temperature": 0},
        **ENGINE,
    )
    results = read_results(out.read_bytes())
    first, second, chat, *wrong = results
    assert (first["custom_id"], first["outputs"][0]["text"]) == (1, text_of("ab", 3))
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert (second["custom_id"], len(second["outputs"]), len(second["outputs"][1]["logprobs"])) == (77, 2, 3)
    assert (chat["outputs"][0]["text"], chat["error"]) == (text_of("user:hi;A:", 5), None)  # the default of the job
    assert [(r["custom_id"], r["outputs"]) for r in wrong] == [(number, []) for number in range(4, 10)]
    assert [r["error"]["field"] for r in wrong] == [
        "prompt", "max_token", "temperature", "tools", "line", "regexp",
    ]  # fmt: skip
    assert "did you mean 'max_tokens'" in wrong[1]["error"]["message"]
    assert (summary.num_failed, summary.exit_code) == (6, 1)


def test_an_engine_that_dies_is_replaced_and_the_culprit_found(folder, tmp_path):
    """The worker is in the engine's process here, so that it takes the engine with it."""
    Path(folder, "has_killed").unlink(missing_ok=True)
    lines = [{"prompt": f"line {i}", "max_tokens": 4} for i in range(24)]
    lines[3] = {"prompt_token_ids": [97, KILLS_ONCE, 98], "max_tokens": 6}  # the first engine alone
    lines[9] = {"prompt_token_ids": [97, KILLS, 98]}  # every engine
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    summary = batch.run(source, out, folder, executor=FakeUniproc, max_in_flight=8, order="input", **ENGINE)
    results = {result["custom_id"]: result for result in read_results(out.read_bytes())}
    assert list(results) == list(range(1, 25))
    (failed,) = [number for number, result in results.items() if result["error"]]
    assert failed == 10
    assert results[10]["error"]["type"] == "EngineDeadError"
    assert "with it alone" in results[10]["error"]["message"]
    assert [results[i + 1]["outputs"][0]["text"] for i in (0, 12, 23)] == [text_of(f"line {i}", 4) for i in (0, 12, 23)]
    assert 3 <= summary.num_engine_restarts <= 5
    assert (summary.num_failed, summary.exit_code) == (1, 1)


class StubEngine:
    """Of it a replica needs no more."""

    config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=1), model=SimpleNamespace(model="m"))

    def __init__(self, **_: object) -> None:
        pass

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


class DiesOnce:
    """A form of lines whose first answer finds the engine dead."""

    def __init__(self) -> None:
        self.num_deaths = 0

    async def answer(self, model, line: InputLine) -> Outcome:
        await asyncio.sleep(0)
        if not self.num_deaths:
            self.num_deaths = 1
            raise EngineDeadError("it is gone")
        return Outcome(Record(line.number, False, 0, 0), b"")


def test_a_death_ends_the_wait_for_lines(monkeypatch):
    """In the order of the input further lines may have to wait for what the dead engine was to answer."""
    monkeypatch.setattr("ringcore.batch.replica.AsyncEngine", StubEngine)
    monkeypatch.setattr("ringcore.batch.replica.ServedModel", lambda *_, **__: None)
    delivered: list[int] = []

    async def run() -> None:
        lines, answered = [InputLine(1, b"{}")], asyncio.Event()

        def deliver(outcome: Outcome) -> None:
            delivered.append(outcome.record.line)
            answered.set()

        async def take() -> InputLine | None:
            if lines:
                return lines.pop()
            await answered.wait()
            return None

        replica = Replica({}, batch.BatchOptions(), Figures(), deliver)
        await replica.start()
        async with asyncio.timeout(60):
            await replica.run(take, DiesOnce())
        assert (replica.num_in_flight, replica.num_restarts) == (0, 1)

    asyncio.run(run())
    assert delivered == [1]


def test_a_line_is_not_blamed_for_one_death(folder, tmp_path):
    """Though it was alone: anything may kill an engine once."""
    Path(folder, "has_killed").unlink(missing_ok=True)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt_token_ids": [97, KILLS_ONCE, 98], "max_tokens": 6}])
    summary = batch.run(source, tmp_path / "out", folder, executor=FakeUniproc, max_in_flight=1, **ENGINE)
    assert (summary.num_failed, summary.num_engine_restarts) == (0, 1)


def test_an_engine_that_may_not_be_replaced_ends_the_job_resumable(folder, tmp_path):
    """Though another one lives: what is done is kept, and the rest is run when the job is resumed."""
    Path(folder, "has_killed").unlink(missing_ok=True)
    lines = [{"prompt": f"line {i}", "max_tokens": 4} for i in range(30)]
    lines[20] = {"prompt_token_ids": [97, KILLS_ONCE, 98], "max_tokens": 6}
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = {"executor": FakeUniproc, "max_in_flight": 2, "data_parallel": 2, "engine_restarts": 0, **ENGINE}
    with pytest.raises(RingcoreError, match="run again with --resume: what is done is kept"):
        batch.run(source, out, folder, **options)
    num_done = len(out.read_bytes().splitlines())
    assert 0 < num_done < 30
    summary = batch.run(source, out, folder, resume=True, **options)
    assert (summary.num_done, summary.num_failed) == (30, 0)
    assert sorted(result["custom_id"] for result in read_results(out.read_bytes())) == list(range(1, 31))


def test_workers_that_die_are_replaced_by_the_engine(folder, tmp_path):
    lines = [{"prompt": f"line {i}", "max_tokens": 4} for i in range(6)]
    lines[2] = {"prompt_token_ids": [97, KILLS, 98]}
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    summary = batch.run(source, out, folder, executor=FakeMultiproc, **ENGINE)
    results = {result["custom_id"]: result for result in read_results(out.read_bytes())}
    assert results[3]["error"]["type"] == "WorkerDiedError"
    assert (summary.num_failed, summary.num_engine_restarts) == (1, 0)


class NeverStarts(FakeExecutor):
    def start(self):
        raise ConfigError("no device today", option="device", value="none")


def test_jobs_that_cannot_run(folder, tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", plain_lines(3)), tmp_path / "out.jsonl"

    def fails(error, said, input=source, output=out, **options):
        with pytest.raises(error, match=said):
            batch.run(input, output, folder, **{"executor": FakeExecutor} | ENGINE | options)

    fails(ConfigError, "order='random': give 'completion' or 'input'", order="random")
    fails(UnknownOptionError, "did you mean 'data_parallel'|unknown engine option 'data_paralel'", data_paralel=2)
    fails(ConfigError, "cannot be read: No such file", input=tmp_path / "none.jsonl")
    fails(ConfigError, "no device today", executor=NeverStarts)
    out.unlink()
    Path(f"{out}.journal").unlink()
    (tmp_path / "torn.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    fails(ConfigError, "torn.gz'?: cannot be read", input=tmp_path / "torn.gz")
    twice = write_lines(tmp_path / "twice.jsonl", [{"custom_id": i % 5, "prompt": "x"} for i in range(7)])
    fails(ConfigError, "a custom_id occurs twice: lines 1 and 6, lines 2 and 7; give", input=twice)
    implied = write_lines(tmp_path / "implied.jsonl", [{"prompt": "x"}, {"prompt": "x", "custom_id": "1"}])
    fails(ConfigError, "lines 1 and 2", input=implied)
    openai = write_lines(tmp_path / "openai.jsonl", [completion("a")])
    fails(ConfigError, "temperature: only of use with plain lines", input=openai, sampling={"temperature": 0})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == []
    out.write_text("precious\n")
    fails(ConfigError, "it exists; continue its job with --resume, or give another output")
    fails(ConfigError, "its journal .* does not", resume=True)
    assert out.read_text() == "precious\n"


def test_what_may_not_change_when_a_job_is_resumed(folder, tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", plain_lines(3)), tmp_path / "out.jsonl"
    common = ENGINE | {"executor": FakeExecutor}
    batch.run(source, out, folder, sampling={"top_k": 5}, **common)
    before = out.read_bytes()

    def fails(said, **options):
        with pytest.raises(ConfigError, match=said):
            batch.run(source, out, folder, resume=True, **{"sampling": {"top_k": 5}} | common | options)

    fails("order: the job began with 'completion', and this is 'input'", order="input")
    fails("top_k: the job began with 5, and this is 6", sampling={"top_k": 6})
    fails("dtype: the job began with 'auto', and this is 'bfloat16'", dtype="bfloat16")
    fails("seed: the job began with 0, and this is 1", seed=1)
    fails("format: the job began with 'plain', and this is 'openai'", format="openai", sampling={})
    write_lines(source, [*plain_lines(3), {"prompt": "more"}])
    fails("input: the content of .*in.jsonl' has changed: it had")
    write_lines(source, plain_lines(3))
    summary = batch.run(source, out, folder, resume=True, sampling={"top_k": 5}, data_parallel=2, **common)
    assert (summary.num_done, summary.exit_code) == (3, 0)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long_form)]
)
def test_a_signal_lets_what_is_in_flight_finish(folder, tmp_path, number, code):
    source, out = write_lines(tmp_path / "in.jsonl", plain_lines(400)), tmp_path / "out.jsonl"
    status = tmp_path / "status.json"
    flags = ["--model", folder, *FAKE, "--max-in-flight", "4", "--status", status]
    process = start(source, out, *flags, "--executor", "batch_executors:Unhurried")  # all would take 18 s
    while not out.exists() or out.stat().st_size < 2000:
        time.sleep(0.005)
    process.send_signal(number)
    found, err = ends(process)
    assert found == code
    results = read_results(out.read_bytes())
    assert 10 < len(results) < 400
    assert f"{len(results)} of 400 requests done, 0 of them failed; {400 - len(results)} are left for --resume" in err
    told = json.loads(status.read_text())
    assert (told["state"], told["num_done"], told["num_in_flight"]) == ("stopped", len(results), 0)
    assert not any(one["finish_reason"] == "abort" for result in results for one in result["outputs"])
    assert ends(start(source, out, *flags, *INSTANT, "--resume"))[0] == 0
    assert len({result["custom_id"] for result in read_results(out.read_bytes())}) == 400
    assert json.loads(status.read_text())["state"] == "complete"


def test_a_second_signal_ends_it_at_once(folder, tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", plain_lines(40)), tmp_path / "out.jsonl"
    status = tmp_path / "status.json"
    flags = ["--executor", "batch_executors:Slow", "--max-in-flight", "4", "--status", status]
    process = start(source, out, "--model", folder, *FAKE, *flags)
    while not status.exists() or json.loads(status.read_text())["num_in_flight"] < 4:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    while json.loads(status.read_text())["state"] != "stopping":
        time.sleep(0.005)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert ends(process)[0] == 130
    assert time.monotonic() - begun < 30  # a step takes a minute


def test_a_disk_that_is_full_ends_the_job(folder, tmp_path):
    """By a limit of the size of files."""
    source, out = write_lines(tmp_path / "in.jsonl", plain_lines(200)), tmp_path / "out.jsonl"
    flags = ["--model", folder, *FAKE, *INSTANT]
    process = start(source, out, *flags, max_file_bytes=20_001)
    code, err = ends(process)
    assert code == 2
    assert "out.jsonl: cannot be written: File too large; make room, or mend it, and run again with --resume" in err
    assert 0 < len(read_results(out.read_bytes())) < 200
    assert ends(start(source, out, *flags, "--resume"))[0] == 0
    assert len({result["custom_id"] for result in read_results(out.read_bytes())}) == 200
