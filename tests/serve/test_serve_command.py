"""`ringcore serve`: a process that serves until it is asked to end, and then leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import uvicorn
from documented import commands
from fake_engine import KILLS_ONCE, SLOW, hurried, make_model_folder
from running_service import DEADLINE_S, eventually, http, text_of

from ringcore.cli import main
from ringcore.errors import EngineDeadError
from ringcore.serve.engine_server import EngineServer

TESTS = Path(__file__).parent.parent
FAKE = ["--load-format", "dummy", "--executor", "fake_engine:FakeMultiproc", "--max-model-len", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


class Command:
    """The command as a process, on a port that it picked."""

    def __init__(self, folder: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringcore.cli", "serve", folder, *FAKE, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )

    def __enter__(self) -> Command:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1$", line)
        assert found, (line, self.process.communicate())
        self.url = found[1]
        # The engine and its worker; an engine that is replaced at its start may be gone, and the new one not there yet.
        eventually(lambda: len(psutil.Process(self.process.pid).children(recursive=True)) >= 2, "the engine runs")
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def engine(self) -> psutil.Process:
        (engine,) = self.engines()
        return engine

    def engines(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if "engine" in child.name()]

    def ends(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); nothing is left of it."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert psutil.wait_procs(self.children, timeout=DEADLINE_S)[1] == []
        return self.process.returncode, out, err

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_it_serves_and_ends_at_ctrl_c(folder, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# of the team\nopen-sesame\n\n")
    flags = ["--served-model-name", "fake", "--api-key-file", str(keys), "--max-n", "2", "--block-size", "8"]
    with Command(folder, *flags) as command:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 4}
        assert http.post(f"{command.url}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer open-sesame"}
        answer = http.post(f"{command.url}/v1/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["text"] == text_of("ab", 4)
        assert "server" not in answer.headers
        refused = http.post(f"{command.url}/v1/completions", json=body | {"n": 3}, headers=headers)
        assert "from 1 to 2" in refused.json()["error"]["message"]
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.ends()
    assert code == 0
    assert '"POST /v1/completions HTTP/1.1" 401' in out
    assert "ready after" in err  # 'serve' logs from info
    assert "Traceback" not in err


@pytest.mark.parametrize(("drain_s", "reason"), [("60", "length"), ("0.2", "abort")])
def test_what_runs_is_drained_before_the_end(folder, drain_s, reason):
    """120 tokens take six seconds, unless they are hurried."""
    answers = []
    with Command(folder, "--drain-s", drain_s, "--no-access-log") as command:

        def ask() -> None:
            body = {"prompt": [97, SLOW], "max_tokens": 120}
            answers.append(http.post(f"{command.url}/v1/completions", json=body, timeout=DEADLINE_S))

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + DEADLINE_S
        while http.get(f"{command.url}/health").json()["num_running"] == 0:
            assert time.monotonic() < deadline
        command.process.send_signal(signal.SIGTERM)
        with hurried(folder) if reason == "length" else nullcontext():
            code, out, err = command.ends()
        asking.join()
    (answer,) = answers
    assert answer.json()["choices"][0]["finish_reason"] == reason
    assert code == 0  # it was asked to end, and has
    assert out == ""
    assert "Traceback" not in err


def test_a_second_ctrl_c_does_not_wait(folder):
    with Command(folder, "--drain-s", "60") as command:
        body = {"prompt": [97, SLOW], "max_tokens": 120, "stream": True}
        with http.stream("POST", f"{command.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGINT)
            eventually(lambda: is_refused(command.url), "the first one was seen")
            command.process.send_signal(signal.SIGINT)
            rest = []
            with suppress(httpx.HTTPError):
                rest.extend(lines)
            code, _, _ = command.ends()
    assert code == 130  # as shells say of what Ctrl-C cut short
    assert not any('"length"' in line for line in rest)  # it was not waited for, which would have taken 6 s


def test_an_engine_that_dies_ends_the_service(folder):
    """The stream has its error, the log says why, and nothing is left."""
    with Command(folder, "--no-access-log") as command:
        body = {"prompt": [97, KILLS_ONCE, 98], "max_tokens": 50, "stream": True}
        answer = http.post(f"{command.url}/v1/completions", json=body)
        *_, error, done, _ = answer.text.split("\n\n")
        assert '"code":"engine_dead"' in error
        assert done == "data: [DONE]"
        code, out, err = command.ends()
    assert code == 1
    assert out == ""
    assert "the engine died, and the service ends: the process 'worker 0'" in err
    assert "killed by SIGKILL" in err
    assert "Traceback" not in err


def test_the_last_lines_of_the_process_are_reported(caplog):
    class Engine:
        async def wait_dead(self):
            return EngineDeadError("the process 'worker 0' ended", last_log=["it ran", "out of memory"])

    server = EngineServer(uvicorn.Config(None), Engine(), 0.0)
    asyncio.run(server._end_with_engine())
    assert (server.should_exit, server.exit_code) == (True, 1)
    assert "the service ends: the process 'worker 0' ended\n  it ran\n  out of memory" in caplog.text


@contextmanager
def held(folder: str) -> Iterator[None]:
    """Meanwhile no engine of the fragile executors becomes ready."""
    (file := Path(folder, "holds")).touch()
    try:
        yield
    finally:
        file.unlink()


def test_an_engine_that_dies_is_replaced_behind_the_same_port(folder):
    """As often as it may be."""
    flags = ["--no-access-log", "--engine-restarts", "1", "--executor", "fake_engine:FragileMultiproc"]
    with Command(folder, *flags) as command:
        with held(folder):
            command.engine().kill()
            eventually(lambda: "starting" in health(command.url), "its death is known")
        eventually(lambda: "ready" in health(command.url), "another one is there")
        body = {"prompt": "ab", "max_tokens": 4}
        assert http.post(f"{command.url}/v1/completions", json=body).json()["choices"][0]["text"] == text_of("ab", 4)
        command.children = psutil.Process(command.process.pid).children(recursive=True)
        command.engine().kill()
        code, _, err = command.ends()
    assert code == 1
    assert "the engine died, restart 1 of 1: the process 'engine'" in err
    assert "the next engine is ready" in err
    assert "as often as engine_restarts allows" in err


def test_replicas_behind_one_port(folder):
    """A replica that dies costs nobody who has got nothing; a restart of all under load loses no request; at the end
    the service says that it is not ready before it refuses anyone."""
    flags = ["--data-parallel-size", "2", "--no-access-log", "--shutdown-delay-s", "60", "--executor"]
    with Command(folder, *flags, "fake_engine:FragileUniproc") as command, Load(command.url) as load:
        assert http.get(f"{command.url}/health").json()["replicas"] == ["ready", "ready"]
        eventually(lambda: load.num_answers > 20, "some are answered")
        assert {one.split('"')[1] for one in labelled(command.url)} == {"0", "1"}

        with held(folder):
            command.engines()[0].kill()
            eventually(lambda: "starting" in replicas(command.url), "its death is known")
            assert [probe(command.url, kind) for kind in ("live", "ready")] == [200, 200]
        eventually(lambda: replicas(command.url) == ["ready", "ready"], "it is replaced")

        before = {engine.pid for engine in command.engines()}
        command.process.send_signal(signal.SIGUSR1)
        while any(engine.pid in before for engine in command.engines()) or replicas(command.url) != ["ready", "ready"]:
            answer = http.get(f"{command.url}/health/ready")
            assert answer.status_code == 200, answer.text
            time.sleep(0.05)
        assert load.failures == []

        command.children += psutil.Process(command.process.pid).children(recursive=True)
        command.process.send_signal(signal.SIGTERM)
        eventually(lambda: probe(command.url, "ready") == 503, "it says that it ends")
        assert probe(command.url, "live") == 200
        num_answers = load.num_answers
        eventually(lambda: load.num_answers > num_answers + 6, "it serves on")
        load.stop()
        command.process.send_signal(signal.SIGTERM)
        code, _, err = command.ends()
    assert load.failures == []
    assert code == 0
    assert "all engines were replaced" in err
    assert "Traceback" not in err


def test_a_restart_is_asked_for_while_the_engine_starts(folder):
    """The signal comes as soon as it no longer ends the process; the engine of the start is replaced."""
    with held(folder):
        command = Command(folder, "--no-access-log", "--executor", "fake_engine:FragileUniproc")
        eventually(lambda: is_caught(command.process.pid, signal.SIGUSR1), "the signal is caught")
        command.process.send_signal(signal.SIGUSR1)
        eventually(lambda: len(command.engines()) == 1, "the engine starts")
        first = command.engine()
    with command:
        eventually(lambda: not first.is_running(), "the engine is replaced")
        eventually(lambda: health(command.url) == "ready", "the new one is ready")
        command.process.send_signal(signal.SIGTERM)
        code, _, err = command.ends()
    assert code == 0
    assert err.index("SIGUSR1: it came while the engines started") < err.index("1 engines are replaced")
    assert "Traceback" not in err


def is_caught(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (number - 1) & 1)


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, url: str) -> None:
        self._url, self._is_over = url, threading.Event()
        self.num_answers, self.failures = 0, []
        self._clients = [threading.Thread(target=self._ask, args=(i,)) for i in range(3)]

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=DEADLINE_S) as client:
            while not self._is_over.is_set():
                prompt = f"{number} asks {self.num_answers}"
                body = {"prompt": prompt, "max_tokens": 8}
                answer = client.post(f"{self._url}/v1/completions", json=body)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != text_of(prompt, 8):
                    self.failures.append(answer.text)
                self.num_answers += 1
                time.sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join(DEADLINE_S)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def probe(url: str, kind: str) -> int:
    return http.get(f"{url}/health/{kind}").status_code


def replicas(url: str) -> list[str]:
    return http.get(f"{url}/health").json()["replicas"]


def labelled(url: str) -> list[str]:
    return re.findall(r"vllm:num_requests_running\{[^}]*\}", http.get(f"{url}/metrics").text)


def health(url: str) -> str:
    return http.get(f"{url}/health").json()["state"]


def is_refused(url: str) -> bool:
    try:
        http.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        pass
    return False


def fails(capsys, *args: str) -> tuple[int, str]:
    """The exit code and the one line of the error."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *args])
    (line,) = capsys.readouterr().err.splitlines()
    return caught.value.code, line


def test_a_port_that_is_taken(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, line = fails(capsys, folder, *FAKE, "--port", port)
    assert code == 2
    assert f"port={port}: cannot listen at 127.0.0.1" in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--api-key-file", "/no/such/file"], "api_key_file='/no/such/file': cannot be read"),
        (["--api-key-file", "/dev/null"], "it has no key"),
        (["--api-key", "two words"], "without spaces"),
        (["--max-n", "0"], "max_n=0: give an integer"),
        (["--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid"),
        (["--port", "0", "--dtype", "float8"], "dtype='float8'"),
    ],
)
def test_an_error_is_one_line(capsys, folder, flags, says):
    code, line = fails(capsys, folder, *FAKE, *flags)
    assert code == 2
    assert says in line


def test_without_the_extra(capsys, folder, monkeypatch):
    monkeypatch.setattr("ringcore.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    code, line = fails(capsys, folder)
    assert code == 2
    assert "serve needs uvicorn: pip install 'ringcore[serve]'" in line


def test_parsers_by_name(capsys, folder):
    code, line = fails(capsys, folder, *FAKE, "--port", "0", "--tool-call-parser", "other")
    assert code == 2
    assert "tool_call_parser='other'" in line
    assert "'hermes'" in line
    code, line = fails(capsys, folder, *FAKE, "--port", "0", "--tool-call-parser", "none", "--reasoning-parser", "x")
    assert "reasoning_parser='x'" in line


def test_help_loads_no_web_framework():
    check = (
        "import sys, contextlib; from ringcore.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['serve', '--help'])\n"
        "print([m for m in ('asyncio', 'fastapi', 'starlette', 'uvicorn', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--max-concurrent-requests" in done.stdout
    assert "--api-key-file" in done.stdout
    assert "--tensor-parallel-size" in done.stdout


COMMANDS = commands("serve", "README.md", "docs/guide/serving.md", "docs/guide/observability.md")


# Each starts a service: those of the README, and of the others the long form.
@pytest.mark.parametrize(
    "command",
    [
        command
        if "--batch-dir" in command or "--data-parallel-size" in command
        else pytest.param(command, marks=pytest.mark.long_form)
        for command in COMMANDS
    ],
)
def test_the_services_of_the_documents(command, folder, tmp_path):
    """As typed, in a folder with the model, which has no weights; one request of each."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name in ("model", "path/to/model"):
        (tmp_path / name).symlink_to(folder)
    fake = ["--load-format", "dummy", "--executor", "ringcore.testing:FakeExecutor", "--max-model-len", "64"]
    words = [sys.executable, "-m", "ringcore.cli", *shlex.split(command)[1:], *fake, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    paths = {"PYTHONPATH": str(TESTS.parent)}
    with subprocess.Popen(words, text=True, cwd=tmp_path, env=os.environ | paths, **pipes) as service:
        try:
            url = service.stdout.readline().split(" at ")[1].strip()
            body = {"prompt": [5, 6], "max_tokens": 2}
            assert http.post(f"{url}/completions", json=body).status_code == 200
            access = service.stdout.readline()
            if "--batch-dir" in command:
                line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
                client = openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S)
                file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
                given = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file.id}
                batch = client.batches.create(**given)
                eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch has ended")
                assert (tmp_path / "batches" / "batches" / f"{batch.id}.json").exists()
            service.terminate()
            out, err = service.communicate(timeout=DEADLINE_S)
        finally:
            service.kill()
    assert service.returncode == 0
    assert "POST /v1/completions" in access
    assert out == "" or "--batch-dir" in command
    if "json" in command:
        assert "POST /v1/completions" in json.loads(access)["message"]
        assert "uvicorn.error" in {json.loads(line)["logger"] for line in err.splitlines()}


def test_the_documents_have_each_kind():
    assert len(COMMANDS) == 6
    assert {"--batch-dir", "--otlp-traces-endpoint", "--log-format"} <= {
        word for one in COMMANDS for word in one.split()
    }
