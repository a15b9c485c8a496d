"""Engines that come and go in one process, in whatever way they go: nothing grows, and nothing stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
from chaos_engine import check_serves, make_config
from process_stat import is_alive, session_members
from process_table import Census, status_kb, wait_until
from scenarios import child_environment

from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient

SHORT, LONG = 4, 200  # engines
WARM_UP = 2
GROWTH_KB = 3 << 10
GONE_S = 60.0
WAIT_S = 90.0


def resident_kb() -> int:
    gc.collect()
    return status_kb("RssAnon")


@pytest.mark.timeout(600)
def test_engines_opened_and_closed_in_one_process_leave_nothing(model_folder, fresh_tmp, is_long):
    def cycle() -> None:
        with EngineCoreClient(make_config(model_folder, tensor_parallel_size=1)) as client:
            check_serves(client)

    for _ in range(WARM_UP):
        cycle()
    before, before_kb = Census(), resident_kb()
    for number in range((LONG if is_long else SHORT) - WARM_UP):
        cycle()
        # What another program has in /dev/shm for a moment is not ours.
        left = f"after {number + 1} engines: {Census().grown_since(before)}"
        assert wait_until(lambda: not Census().grown_since(before), GONE_S), left
    assert resident_kb() < before_kb + GROWTH_KB
    assert list(fresh_tmp.iterdir()) == []


@pytest.mark.long_form
def test_two_engines_at_once_in_one_process_know_nothing_of_each_other(model_folder, fresh_tmp):
    before = Census()
    with EngineCoreClient(make_config(model_folder)) as first, EngineCoreClient(make_config(model_folder)) as second:
        for client in (first, second):
            check_serves(client)
        first.close()
        check_serves(second)
        with EngineCoreClient(make_config(model_folder)) as third:
            check_serves(third)
        check_serves(second)
    assert Census().grown_since(before) == []
    assert list(fresh_tmp.iterdir()) == []


class FailsInInit(EngineCoreClient):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.wait_ready()
        raise ZeroDivisionError("in a subclass")


def drop_ready(config) -> None:
    EngineCoreClient(config).wait_ready()


def drop_starting(config) -> None:
    EngineCoreClient(config)


def drop_in_a_cycle(config) -> None:
    client = EngineCoreClient(config)
    client.wait_ready()
    client.myself = client
    del client
    gc.collect()


def fail_in_init(config) -> None:
    with pytest.raises(ZeroDivisionError):
        FailsInInit(config)


def fail_in_a_block(config) -> None:
    def block() -> None:
        with EngineCoreClient(config) as client:
            client.wait_ready()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()


def fail_at_start(config) -> None:
    client = EngineCoreClient(make_config(config.model.model, tensor_parallel_size=1, kv_cache_bytes=4096))
    with pytest.raises(RingcoreError):
        client.wait_ready()


@pytest.mark.parametrize(
    "drop",
    [
        drop_ready,
        pytest.param(drop_starting, marks=pytest.mark.long_form),
        pytest.param(drop_in_a_cycle, marks=pytest.mark.long_form),
        fail_in_init,
        pytest.param(fail_in_a_block, marks=pytest.mark.long_form),
        fail_at_start,
    ],
)
def test_an_engine_that_nobody_closes_leaves_nothing(model_folder, fresh_tmp, drop):
    config = make_config(model_folder, tensor_parallel_size=1)
    drop(config)
    gc.collect()
    before = Census()
    drop(config)
    gc.collect()
    assert wait_until(lambda: not Census().grown_since(before), GONE_S), Census().grown_since(before)
    assert list(fresh_tmp.iterdir()) == []


SCRIPT = """
    import os, sys, threading
    from chaos_engine import make_config, check_serves
    from ringcore.front_end.client import EngineCoreClient
    client = EngineCoreClient(make_config(sys.argv[1]))
    check_serves(client)
    print(*client.ready.pids.values(), flush=True)
    {then}
"""
ENDS = {
    "falls off its end": ("pass", 0),
    "leaves": ("sys.exit(3)", 3),
    "leaves at once": ("os._exit(4)", 4),
    "raises": ("raise ZeroDivisionError", 1),
    "aborts": ("os.abort()", -6),
    "waits in a thread": ("threading.Thread(target=client.get_outputs, daemon=True).start()", 0),
    "keeps a reference in a module": ("sys.client = client; del client", 0),
}
LATER_ENDS = ("leaves", "raises", "keeps a reference in a module")  # as another one does, but for a line


@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=pytest.mark.long_form) if end in LATER_ENDS else end for end in ENDS]
)
def test_a_script_that_ends_without_closing_leaves_nothing(model_folder, tmp_path, end):
    then, code = ENDS[end]
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(then=then))
    with subprocess.Popen(
        [sys.executable, str(script), model_folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(tmp),
        start_new_session=True,
    ) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, err.decode()
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 3
    assert wait_until(lambda: not any(map(is_alive, pids)) and not session_members(process.pid), GONE_S)
    assert os.listdir(tmp) == []
