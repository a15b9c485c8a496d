"""`ringcore worker`: the documented commands, on two hosts that are both this machine; a host that is lost."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import expected, make_model_folder
from far_agent import Agent, with_path

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.cli.worker import worker
from ringcore.config.admin_keys import create_keys
from ringcore.executor.far.several_hosts import free_port
from ringcore.protocol.requests import EngineCoreRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "several_hosts.md").read_text().split("## ")[0]
FAKE = ["--load-format", "dummy", "--executor", "fake_engine:FakeMultiproc", "--max-model-len", "64", "--no-progress"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def commands(text: str) -> list[list[str]]:
    """Those that begin a line, with their further lines."""
    found = re.findall(r"^ {4,}ringcore ([^\n#]+)", text.replace("\\\n", " "), re.M)
    return [shlex.split(one) for one in found]


def test_documented_commands(tmp_path, folder):
    assert commands(PAGE) == commands(worker.__doc__)
    endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    text = PAGE.replace("./model", folder).replace("tcp://10.0.0.1:5700", endpoint)
    keys, generate, join = commands(text)

    def start(command: list[str], *flags: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", "ringcore.cli", *command, *flags]
        environment = with_path(ROOT, ROOT / "tests")
        return subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    with start(keys) as made:
        assert made.wait() == 0
    with start(generate, *FAKE, "--max-tokens", "3") as engine, start(join) as agent:
        said, _ = engine.communicate()
        assert said.splitlines()[-1] == bytes(expected(list(b"Once upon a time"), 3)).decode()
        assert (engine.returncode, agent.wait()) == (0, 0)


def test_a_lost_host_is_replaced_and_requests_are_computed_again(tmp_path, folder):
    keys, endpoint = create_keys(tmp_path / "keys"), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    options = {"hosts": ["b", "localhost"], "join_endpoint": endpoint, "join_keys": keys, "tensor_parallel_size": 2}
    options |= {"executor": "fake_engine:FakeMultiproc", "load_format": "dummy", "max_model_len": 64}
    agents = [Agent("b", endpoint, keys, [])]
    try:
        with EngineCore(EngineConfig.from_options(model=folder, max_worker_restarts=1, **options)) as core:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            core.add_request(
                EngineCoreRequest(request_id="a", prompt_token_ids=[1, 2], sampling_params=params, arrival_s=0.0)
            )
            tokens: list[int] = []
            while core.has_unfinished:
                tokens += [token for output in core.step().outputs for token in output.new_token_ids]
                if len(tokens) > 5 and len(agents) == 1:
                    agents[0].kill()
                    while "lost" not in core.health().ranks[0].process_state:
                        time.sleep(0.01)  # the end of the connection arrives
                    agents.append(agents[0].again())
            assert tokens == expected([1, 2], 20)
            assert core.num_restarts == 1
            assert "the host 'b'" in core.health().restart_cause
    finally:
        for agent in agents:
            agent.kill()
