"""Kernels that are compiled by processes without a GPU: that a thread finds what its process compiled, compiles what it
did not, and that none is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_precompile import run

from ringcore.worker.start_up import compilers

SCRIPT = """
    import os, signal, sys, time
    import psutil, torch, triton_for_sm90
    from pathlib import Path
    from ringcore.kernels.activation import silu_and_mul
    from ringcore.kernels.launch.compile_processes import CompileProcesses
    from ringcore.kernels.launch.precompile import KernelCompiler, Variant, intercept_launches
    from ringcore.kernels.rms_norm import rms_norm

    def cubins():
        return {path.name: path.stat().st_mtime_ns for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}

    def launch(compiler):
        with intercept_launches(compiler.add):
            silu_and_mul(torch.ones(1, 64))
            rms_norm(torch.ones(1, 64), torch.ones(64), 1e-6, out=torch.zeros(1, 64))

    compile = Variant.compile
    with CompileProcesses(1) as processes:
        server = psutil.Process(processes.pid)
        Variant.compile = lambda variant, *, load: None  # this process compiles nothing
        with KernelCompiler(torch.device("cpu"), 1, (0, 1), processes) as compiler:
            launch(compiler)
        Variant.compile = compile
        by_process = cubins()
        print(*sorted(by_process))
        children = server.children()
        with KernelCompiler(torch.device("cpu"), 1, (0, 1), processes) as compiler:
            launch(compiler)
        assert cubins() == by_process, "compiled twice"
        with intercept_launches() as again:
            silu_and_mul(torch.ones(1, 64))
        assert not again, "it is where the next launch looks for it"

        with intercept_launches() as found:
            silu_and_mul(torch.ones(2, 128))
        (variant,) = found.values()
        bad = Variant(variant.kernel, variant.specialization.replace("_activate", "_no_such"))
        assert not processes.compile(0, bad.request())
        try:
            with KernelCompiler(torch.device("cpu"), 1, (0, 1), processes) as compiler:
                compiler.add(bad, variant)
        except RuntimeError as error:
            print("raised", "_no_such" in str(error))
        assert len(cubins()) == 2 and len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))) == 3

        (child,) = children
        child.kill()
        with intercept_launches() as found:
            silu_and_mul(torch.ones(2, 256))
        with KernelCompiler(torch.device("cpu"), 1, (0, 1), processes) as compiler:
            compiler.add(*found.values())
        print(len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))), "after its end")
    gone, alive = psutil.wait_procs([server, child], timeout=10)
    print(len(alive), "left")
"""


def test_threads_ask_processes_and_compile_what_those_do_not(tmp_path):
    compiled, raised, after, left = run(SCRIPT, tmp_path).splitlines()
    assert compiled.split() == ["_activate_and_multiply_kernel.cubin", "_rms_norm_kernel.cubin"]
    assert raised == "raised True"
    assert after == "4 after its end"
    assert left == "0 left"


DYING = """
import sys, time
from ringcore.kernels.launch.compile_processes import CompileProcesses
if __name__ == "__main__":
    processes = CompileProcesses(2)
    print(processes.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("are_forked", [True, pytest.param(False, marks=pytest.mark.long_form)])
def test_they_die_with_the_process_that_started_them(are_forked):
    """Also while they import torch."""
    with subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = psutil.Process(int(process.stdout.readline()))
            deadline = time.monotonic() + 60
            while are_forked and len(server.children()) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            family = [server, *server.children()]
            assert len(family) == (3 if are_forked else 1)
        finally:
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


class _Started:
    def __init__(self, num: int) -> None:
        self.num, self.is_closed = num, False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[_Started]:
    """On a GPU's host of 16 cores where nothing is listed; the fakes that were started."""
    found: list[_Started] = []

    def start(num: int) -> _Started:
        found.append(_Started(num))
        return found[-1]

    monkeypatch.setattr(compilers, "CompileProcesses", start)
    monkeypatch.setattr(compilers, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(compilers, "_begun", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_they_are_begun_before_it_is_known_what_is_compiled(started):
    compilers.begin_compilers(2)
    with compilers.taken_compilers("cuda", 2) as taken:
        assert [taken] == started
    (one,) = started
    assert (one.num, one.is_closed) == (8, True)
    compilers.drop_compilers()
    assert len(started) == 1


def test_what_nobody_takes_is_closed(started):
    compilers.begin_compilers(1)
    compilers.drop_compilers()
    assert [one.is_closed for one in started] == [True]


def test_where_kernels_are_listed_nothing_is_begun(started, tmp_path):
    folder = Path(tmp_path, "ringcore", "kernels")
    folder.mkdir(parents=True)
    (folder / "one.json").touch()
    compilers.begin_compilers(1)
    assert not started
    with compilers.taken_compilers("cuda", 1) as taken:
        assert [taken] == started


def test_few_cores_compile_in_threads(started, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    compilers.begin_compilers(1)
    with compilers.taken_compilers("cuda", 1) as taken:
        assert taken is None
    assert not started
    assert compilers.num_compilers(1) == 2
    assert compilers.num_compilers(4) == 1


def test_many_cores_are_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(192)))
    assert [compilers.num_compilers(num_ranks) for num_ranks in (1, 8)] == [32, 24]


def test_a_cpu_has_none(started):
    with compilers.taken_compilers("cpu", 1) as taken:
        assert taken is None
    assert not started


def test_without_a_driver_nothing_is_begun(started, monkeypatch):
    monkeypatch.setattr(compilers, "has_gpu_driver", lambda: False)
    compilers.begin_compilers(1)
    assert not started


def test_what_cannot_be_started_is_told(started, monkeypatch, caplog):
    def fail(num: int) -> None:
        raise OSError("no process")

    monkeypatch.setattr(compilers, "CompileProcesses", fail)
    with compilers.taken_compilers("cuda", 1) as taken:
        assert taken is None
    assert "no process" in caplog.text
