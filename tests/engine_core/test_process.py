"""The engine process by itself: its messages from the first to the last, and what ends it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from fake_engine import BrokenMultiproc, FakeMultiproc, make_model_folder
from process_stat import is_alive

from ringcore import EngineConfig
from ringcore.engine_core import process as process_module
from ringcore.engine_core.process import CHANNEL, ENTRY, STATUS, EngineStart
from ringcore.engine_core.transport.channel import ClientChannel, EngineChannel, StreamClosed, channel_pair
from ringcore.errors import CapacityError
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.status_board import create_board
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import EngineDead, EngineReady, Shutdown

WAIT_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


class Running:
    """An engine process, and the other end of its channel."""

    def __init__(self, folder, executor=FakeMultiproc) -> None:
        config = EngineConfig.from_options(
            model=folder, load_format="dummy", executor=executor, max_model_len=64, block_size=8
        )
        self.socket, theirs = channel_pair()
        with theirs:
            payload = encoder().encode(EngineStart(config))
            status_fd = create_board(1)
            self.process = ChildProcess.start("engine", ENTRY, payload, {CHANNEL: theirs.fileno(), STATUS: status_fd})
            os.close(status_fd)
        self._never = os.eventfd(0)
        self.channel = ClientChannel(self.socket, self.process.pidfd, self._never)

    def receive(self):
        """The next message; None where the process has closed its end."""
        try:
            while (received := self.channel.receive()) is None:
                assert select.select([self.channel], [], [], WAIT_S)[0], "no message came"
        except StreamClosed:
            return None
        return received.message

    def close(self) -> None:
        self.channel.close()
        self.process.terminate()
        os.close(self._never)


@pytest.fixture
def start(folder):
    started = []

    def start(*args):
        started.append(Running(folder, *args))
        return started[-1]

    yield start
    for running in started:
        running.close()


def say_goodbye(running):
    running.channel.send(Shutdown())


def shutdown_write(running):
    running.channel.shutdown_write(Shutdown(), 1.0)


def vanish(running):
    running.channel.close()


def talk_nonsense(running):
    running.socket.sendall(b"nonsense, and more of it than a header has")


@pytest.mark.parametrize("end", [say_goodbye, shutdown_write, vanish, talk_nonsense])
def test_its_client_ends_it_and_its_workers(start, end):
    running = start()
    ready = running.receive()
    assert isinstance(ready, EngineReady)
    assert ready.pids["engine"] == running.process.pid
    end(running)
    assert running.process.wait(WAIT_S)
    assert running.process.exit_code == 0
    assert not any(is_alive(pid) for pid in ready.pids.values())


def test_a_failed_start_says_why_and_ends(start):
    running = start(BrokenMultiproc)
    dead = running.receive()
    assert isinstance(dead, EngineDead)
    assert (dead.error.type, dead.error.details["tensor"]) == ("ModelLoadError", "x")
    assert running.receive() is None
    assert running.process.wait(WAIT_S)
    assert running.process.exit_code == 1


@pytest.mark.parametrize("after_s", [0.3, None], ids=["while it starts", "when it is ready"])
def test_sigterm_is_its_last_word(start, after_s):
    running = start()
    if after_s is None:
        assert isinstance(running.receive(), EngineReady)
    else:
        time.sleep(after_s)
    running.process.signal(signal.SIGTERM)
    messages = [running.receive()]
    while messages[-1] is not None:
        messages.append(running.receive())
    last = messages[-2] if len(messages) > 1 else None
    # Before it has got so far as to have a handler, SIGTERM ends it without a word.
    if last is not None:
        assert last.error.details["signal"] == "SIGTERM"
    else:
        assert after_s is not None
    assert running.process.wait(WAIT_S)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (CapacityError("too small", max_model_len=5), "CapacityError", "too small"),
        (CapacityError("too small", odd=object()), "CapacityError", "too small (its details cannot be sent"),
        (ZeroDivisionError("oops"), "EngineDeadError", "the engine process failed: ZeroDivisionError: oops"),
        (process_module._Terminated(), "EngineDeadError", "SIGTERM"),
    ],
)
def test_last_words_of_every_kind(error, kind, says):
    ours, theirs = channel_pair()
    engine = EngineChannel(theirs.detach())
    client = ClientChannel(ours, -1, -1)
    try:
        process_module._send_fatal_error(engine, None, error)
        last = client.receive().message
        assert isinstance(last, EngineDead)
        assert last.error.type == kind
        assert says in last.error.message
    finally:
        engine.close()
        client.close()


IN_A_DESTRUCTOR = """
import signal, sys, time
from ringcore.engine_core import process

class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

sys.unraisablehook = process._raise_again
process._set_handlers(process._raise_terminated)
try:
    Dies()
    time.sleep(20)
except process._Terminated:
    print("ends")
"""


def test_a_signal_in_a_destructor_is_not_lost():
    command = [sys.executable, "-c", IN_A_DESTRUCTOR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (done.stdout, done.stderr) == ("ends\n", "")
