"""Workers are killed while a model generates: the caller sees a pause, and the tokens of an undisturbed run.

When they are killed, and what is in flight then, is varied with a tiny model; SmolLM2-135M is in a whole engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from engine import generate, make_core, tokens

from ringcore import LLM, SamplingParams
from ringcore.errors import EngineDeadError

pytestmark = pytest.mark.timeout(300)

OPTIONS = {"dtype": "float32", "max_model_len": 512, "kv_cache_bytes": 1 << 28}
PROMPTS = [[11 + (37 * i + 5 * j * j) % 300 for j in range(n)] for i, n in enumerate([3, 17, 40, 120, 9])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, seed=77, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True),  # the engine draws the seed
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
]


def undisturbed(model: str) -> list[list[int]]:
    with make_core(model, executor="uniproc", **OPTIONS) as core:
        return tokens(generate(core, PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def tiny_undisturbed(tiny_qwen2):
    return undisturbed(tiny_qwen2)


def _call_until_it_fails(llm):
    for _ in range(500):
        llm.collective_rpc("stats", timeout=60)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("after_steps", "depth"), [(30, 2), *(pytest.param(*one, marks=pytest.mark.long_form) for one in ((1, 2), (12, 1)))]
)
def test_the_same_tokens_as_without_the_death(tiny_qwen2, tiny_undisturbed, after_steps, depth):
    with make_core(tiny_qwen2, max_worker_restarts=1, steps_in_flight=depth, **OPTIONS) as core:
        step, num_steps = core.step, 0

        def stepped():
            nonlocal num_steps
            num_steps += 1
            if num_steps == after_steps:
                os.kill(core.ready.pids["worker 0"], signal.SIGKILL)
            return step()

        core.step = stepped
        assert tokens(generate(core, PROMPTS, PARAMS)) == tiny_undisturbed
        assert core.num_restarts == 1
        assert core.health().state == "ready"
        assert "SIGKILL" in core.health().restart_cause


@pytest.mark.real_model
@pytest.mark.long_form
def test_through_the_front_door_twice(smollm2):
    """The worker of a whole engine is killed in the middle of generate(), and its successor as well."""
    with LLM(smollm2, max_worker_restarts=2, **OPTIONS) as llm:
        killed: list[int] = []
        stop = threading.Event()

        def kill_two():
            while len(killed) < 2 and not stop.wait(0.02):
                health = llm.health()
                # Not while a request is on trial, alone: a death then would be laid to it.
                if health.state == "ready" and health.step >= 8 + 8 * len(killed) and health.num_running >= 3:
                    pid = health.ranks[0].pid
                    if pid not in killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

        killer = threading.Thread(target=kill_two)
        killer.start()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        stop.set()
        killer.join()
        assert [output.outputs[0].token_ids for output in outputs] == undisturbed(smollm2)
        assert len(killed) == 2
        assert llm.health().num_restarts == 2
        os.kill(llm.health().ranks[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            _call_until_it_fails(llm)
        assert llm.health().state == "dead"
