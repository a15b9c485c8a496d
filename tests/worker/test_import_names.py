"""The names of transformers' models are read by another process where they are not kept."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from ringcore.checkpoint import ModelSpec, TransformersSpec
from ringcore.host.import_structure import has_import_structure
from ringcore.worker.start_up import import_names
from ringcore.worker.start_up.import_names import begin_reading_names

DEADLINE_S = 120.0


def config_of(spec_type: type = TransformersSpec) -> Any:
    """As much of an `EngineConfig` as is read, for two ranks of a host."""
    layout = SimpleNamespace(local_rank=lambda rank: rank % 2)
    spec = Mock(spec=spec_type)
    return SimpleNamespace(model=SimpleNamespace(spec=spec), parallel=SimpleNamespace(layout=layout))


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[subprocess.Popen]:
    """The processes that are started, with nothing kept yet."""
    found: list[subprocess.Popen] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen:
        found.append(subprocess.Popen(*args, **options))
        return found[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replaced = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(import_names, "subprocess", replaced)
    monkeypatch.setattr(import_names, "is_own_process", lambda: True)
    return found


def test_they_are_read_once(started):
    begin_reading_names(config_of(), 2)
    (process,) = started
    assert process.wait(DEADLINE_S) == 0
    assert has_import_structure()
    begin_reading_names(config_of(), 2)
    assert len(started) == 1


@pytest.mark.parametrize(("spec_type", "rank"), [(ModelSpec, 0), (TransformersSpec, 1)])
def test_a_native_model_and_other_ranks_read_none(started, spec_type, rank):
    begin_reading_names(config_of(spec_type), rank)
    assert not started


def test_an_application_that_is_the_worker_itself_reads_none(started, monkeypatch):
    monkeypatch.setattr(import_names, "is_own_process", lambda: False)
    begin_reading_names(config_of(), 0)
    assert not started


def test_a_process_that_cannot_be_started_is_told(started, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    begin_reading_names(config_of(), 0)
    assert "read by the worker" in caplog.text


DYING = """
import sys, time
sys.path.insert(0, "tests/worker")
from ringcore.host.own_process import mark_own_process
from test_import_names import begin_reading_names, config_of
mark_own_process()
begin_reading_names(config_of(), 0)
time.sleep(100)
"""


def test_it_dies_with_the_worker(started):
    with subprocess.Popen([sys.executable, "-c", DYING]) as worker:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while (
                not (found := psutil.Process(worker.pid).children())
                and worker.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            (reader,) = found
        finally:
            worker.kill()
    _, alive = psutil.wait_procs([reader], timeout=10)
    assert not alive
