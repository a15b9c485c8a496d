"""Engines of other shapes sleep: in this process, with weights in a file, on two ranks; and one is killed at it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine import generate, make_core, tokens
from new_weights import OtherWeights
from sleeping import (
    OPTIONS,
    PROMPTS,
    check_no_growth,
    check_tokens,
    expected,
    greedy,
    holdings,
    is_empty,
    resident_bytes,
    unnamed_bytes,
    wait_until,
    weights_bytes,
)

from ringcore import LLM
from ringcore.errors import EngineDeadError

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]


@pytest.mark.long_form
def test_in_this_process_at_depth_one(smollm2):
    def check(core):
        assert tokens(generate(core, PROMPTS, greedy(6))) == expected(6)

    with make_core(smollm2, executor="uniproc", steps_in_flight=1, **OPTIONS) as core:
        check(core)
        core.sleep(1)
        core.wake_up(["kv_cache"])
        core.wake_up(["weights"])
        check(core)
        before = psutil.Process().memory_info().rss
        core.sleep(2)
        assert before - psutil.Process().memory_info().rss >= 0.9 * core.ready.memory_bytes[0]["weights_bytes"]
        core.wake_up()
        core.reload_weights(smollm2)
        check(core)


def test_weights_in_a_file(smollm2, tmp_path):
    with LLM(smollm2, sleep_directory=tmp_path, steps_in_flight=1, **OPTIONS) as llm:
        check_tokens(llm)
        held = []
        for _ in range(2):
            before = resident_bytes(llm)
            llm.sleep()
            assert before - resident_bytes(llm) >= 0.9 * weights_bytes(llm)
            assert is_empty(tmp_path)  # it has no name
            llm.wake_up()
            check_tokens(llm, 2)
            held.append(holdings(llm))
        check_no_growth(held[0], held[1], 8 << 20)
        llm.sleep()
        for pid in llm.ready.pids.values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            llm.wake_up()
    assert is_empty(tmp_path)


def test_two_ranks(tiny_qwen2, tmp_path):
    options = OPTIONS | {"tensor_parallel_size": 2, "kv_cache_bytes": 1 << 24, "sleep_directory": tmp_path}
    other = OtherWeights(tiny_qwen2)
    prompts = [[token % 300 for token in prompt] for prompt in PROMPTS]
    with make_core(tiny_qwen2, **options) as core:

        def generated():
            return tokens(generate(core, prompts, greedy(12)))

        usual = generated()
        for tags in (None, ["weights"], ["kv_cache"]):
            assert len(core.sleep(1).ranks) == 2
            core.wake_up(tags)
            core.wake_up()
            assert generated() == usual
        core.sleep(2)
        core.wake_up()
        core.start_weight_update()
        for chunk in other.chunks(3):
            core.update_weights(chunk)
        core.finish_weight_update()
        new = generated()
        assert new != usual
        for prompt, token_ids in zip(prompts, new, strict=True):
            other.check_greedy(prompt, token_ids)
        core.sleep(1)  # they are kept like any others
        core.wake_up()
        assert generated() == new
        core.reload_weights(tiny_qwen2)
        assert generated() == usual


def test_everything_is_killed_while_it_falls_asleep(smollm2, tmp_path):
    script = Path(__file__).with_name("falls_asleep.py")
    process = subprocess.Popen(
        [sys.executable, script, smollm2, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "asleep soon\n"
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) >= 3
        wait_until(lambda: unnamed_bytes(family[-1].pid, tmp_path) > 0)  # they are being written
        for one in family:
            assert "/dev/shm/" not in Path(f"/proc/{one.pid}/maps").read_text()
        for one in family:
            os.kill(one.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    assert psutil.wait_procs(family[1:], timeout=90)[1] == []
    assert is_empty(tmp_path)
