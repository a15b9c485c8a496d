"""A conversation in the terminal: piped, and at a pseudo-terminal."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import expected, make_model_folder
from raw_service import RawService

from ringcore.cli import main
from ringcore.cli.chat_session import ChatSession, MessageReader, complete_command
from ringcore.errors import InvalidRequestError

TESTS = Path(__file__).parents[1]
FAKE = ["--load-format", "dummy", "--executor", "fake_engine:FakeUniproc", "--max-model-len", "256"]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def service():
    with RawService() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def talk(monkeypatch, capsys, text, *flags) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as caught:
        main(["chat", *flags])
    assert caught.value.code in (0, None)
    return capsys.readouterr().out


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


# -------------------------------------------------------------------------------------------------------------------
# Behind a URL, piped.


def test_a_conversation_with_a_service(service, monkeypatch, capsys):
    service.bodies.clear()
    flags = ["--url", service.url, "--system", "Be brief.", "--max-tokens", "3", "--api-key", "key"]
    out = talk(monkeypatch, capsys, "one\ntwo \\\nlines\n", *flags)
    assert out == "hm w1 w2 \nhm w1 w2 \n"
    (_, first, headers), (_, second, _) = service.bodies
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "one"}]
    assert (first["model"], first["max_tokens"], first["stream"]) == ("raw", 3, True)
    assert headers["Authorization"] == "Bearer key"
    assert second["messages"] == [  # without the reasoning
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "w1 w2 "},
        {"role": "user", "content": "two \nlines"},
    ]


def test_commands_of_a_conversation(service, monkeypatch, capsys, tmp_path):
    service.bodies.clear()
    file = tmp_path / "talk.json"
    lines = [
        "/system Say little.", "/params temperature=0.5 max_tokens=2", "a", f"/save {file}", "/reset", "/params",
        "/nonsense", "/params x", "FAULT-error", "b", f"/load {file}", "c", "/exit", "never",
    ]  # fmt: skip
    out = talk(monkeypatch, capsys, "\n".join(lines) + "\n", "--url", service.url, "--model", "mine")
    assert "temperature=0.5 max_tokens=2" in out
    assert "ringcore: /nonsense: no such command" in out
    assert "ringcore: params: 'x': give NAME=VALUE" in out
    assert "ringcore: the answer broke off: {'message': 'out of order'}" in out
    saved = json.loads(file.read_text())
    assert [one["content"] for one in saved["messages"]] == ["Say little.", "a", "w1 "]
    asked = [[one["content"] for one in body["messages"]] for _, body, _ in service.bodies]
    assert asked == [
        ["Say little.", "a"],
        ["Say little.", "FAULT-error"],  # which is forgotten
        ["Say little.", "b"],
        ["Say little.", "a", "w1 ", "c"],
    ]
    assert all(body["model"] == "mine" and body["temperature"] == 0.5 for _, body, _ in service.bodies)


# -------------------------------------------------------------------------------------------------------------------
# A model of this process.


def test_a_model_in_this_process(folder, monkeypatch, capsys):
    flags = ["--model", folder, *FAKE, "--max-tokens", "4"]
    out = talk(monkeypatch, capsys, '"""\nab\ncd\n"""\n/params nonsense=1\ne\n/params nonsense=null\nf', *flags)
    first = text_of("user:ab\ncd;A:", 4)
    lines = out.split("\n")
    assert lines[:2] == [first, "max_tokens=4 nonsense=1"]
    assert "ringcore: " in lines[2]
    assert lines[4] == text_of(f"user:ab\ncd;assistant:{first};user:f;A:", 4)


REASONING = """
import sys
from pathlib import Path
from echo_model import _make_folder
_make_folder(Path(sys.argv[1]), "{# </think> #}", special=("<think>", "</think>", "<|pad|>"), plain=())
"""


class PseudoTerminal:
    """The command at a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        env = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS / 'serve'}:{TESTS.parent}", "TERM": "xterm"}
        command = [sys.executable, "-m", "ringcore.cli", "chat", *args]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, close_fds=True
        )
        os.close(theirs)
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode  # a read may end in a character

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, *, interrupts: bool = False) -> str:
        """What came up to it, and with it. interrupts: by Ctrl-C, again and again: readline misses one that comes just
        before it waits."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if interrupts:
                os.kill(self._process.pid, signal.SIGINT)
            while select.select([self._ours], [], [], 0.5)[0] and text not in self.seen:
                self.seen += self._decode(os.read(self._ours, 4096))
        came, _, self.seen = self.seen.partition(text)
        return came + text

    def __enter__(self) -> PseudoTerminal:
        return self

    def ends(self) -> int:
        return self._process.wait(DEADLINE_S)

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.mark.long_form
def test_reasoning_is_dim_and_ctrl_d_ends(tmp_path):
    env = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS / 'serve'}:{TESTS.parent}"}
    subprocess.run([sys.executable, "-c", REASONING, str(tmp_path)], check=True, env=env, timeout=DEADLINE_S)
    flags = ["--load-format", "dummy", "--executor", "echo_worker:EchoMultiproc", "--max-model-len", "1024"]
    with PseudoTerminal("--model", str(tmp_path), *flags) as terminal:
        terminal.wait_for("> ")
        terminal.type("<think>let me see</think>so it is<|pad|>!\n")
        terminal.wait_for("\n")  # the echo of the line
        shown = terminal.wait_for("> ")
        assert "\x1b[2mlet me see" in shown
        assert "\x1b[0m\r\nso it is!" in shown
        assert "think>" not in shown
        terminal.type("\x04")
        assert terminal.ends() == 0


@pytest.mark.long_form
def test_ctrl_c_at_the_prompt_drops_the_line(folder):
    with PseudoTerminal("--model", folder, *FAKE, "--max-tokens", "200") as terminal:
        terminal.wait_for("> ")
        terminal.wait_for("> ", interrupts=True)  # at the prompt: another prompt
        terminal.type("a\\\n")
        terminal.wait_for("… ")
        terminal.wait_for("> ", interrupts=True)  # within a message: it is dropped
        terminal.type("/params max_tokens=3\n")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.ends() == 0


def test_ctrl_c_keeps_what_came(service):
    with PseudoTerminal("--url", service.url, "--max-tokens", "4") as terminal:
        terminal.wait_for("> ")
        terminal.type("FAULT-slow\n")
        terminal.wait_for("hm ")
        terminal.wait_for("(stopped)", interrupts=True)
        service.bodies.clear()
        terminal.wait_for("> ")
        terminal.type("more\n")
        terminal.wait_for("w3 ")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.ends() == 0
    (_, body, _) = service.bodies[-1]
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]


# -------------------------------------------------------------------------------------------------------------------
# Parts.


def read_all(*lines: str) -> list[str]:
    waiting = list(lines)

    def read_line(continues: bool) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    reader, messages = MessageReader(read_line), []
    while True:
        try:
            messages.append(reader.read())
        except EOFError:
            return messages


def test_messages_of_several_lines():
    assert read_all("a", "b\\", "c", '"""', "d", "", "e\\", '"""', "f") == ["a", "b\nc", "d\n\ne\\", "f"]
    assert read_all("a\\") == ["a"]
    assert read_all('"""', "a", "b") == ["a\nb"]


def test_help_names_every_command():
    said = ChatSession().run_command("/help")
    assert said is not None
    for name in complete_command("/"):
        assert name in said
    assert complete_command("/sy") == ["/system"]


@pytest.mark.parametrize(
    ("line", "says"),
    [("/save", "give a file"), ("/save /no/such/folder/x", "cannot be written"), ("/load /dev/null", "is no saved")],
)
def test_what_is_wrong_with_a_command(line, says):
    with pytest.raises(InvalidRequestError, match=says):
        ChatSession().run_command(line)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give --model, or --url"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "dtype: an option of an engine in this process"),
        (["--url", "127.0.0.1:9"], "give http://HOST:PORT"),
        (["--model", "x", "--top-p", "0"], "top_p=0.0"),
    ],
)
def test_an_error_before_a_conversation_is_one_line(capsys, flags, says):
    with pytest.raises(SystemExit) as caught:
        main(["chat", *flags])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_commands_of_the_guide(service, folder, tmp_path):
    """As typed in a shell, with a service at another port, and a model without weights."""
    (tmp_path / "model").symlink_to(folder)
    guide = (TESTS.parent / "docs" / "guide" / "chat.md").read_text()
    commands = re.findall(r"^    (.*ringcore chat .*)$", guide, re.M)
    assert len(commands) == 3
    for command in commands:
        typed = command.replace("http://127.0.0.1:8000", service.url)
        typed = typed.replace("ringcore chat", f"{sys.executable} -m ringcore.cli chat")
        typed = typed if "echo" in typed else f"echo hi | {typed}"
        typed += "" if "--url" in typed else f" {' '.join(FAKE)} --max-tokens 9"
        done = subprocess.run(
            typed,
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, (typed, done.stderr)
        assert done.stdout.strip()
