"""Faults on purpose: processes killed, stopped and interrupted, frames forged, system calls failed.

Each test has a short form, for every change, and a long one: `make chaos`, or `pytest tests/chaos --chaos-long`, or
RINGCORE_CHAOS_LONG=1 where pytest is started from another folder.
"""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from fake_engine import make_model_folder

SHORT_SEED = 20_261


def pytest_collection_modifyitems(config, items):
    """The long form is bounded by its own waits, not by the time that a unit test may take."""
    if config.option.chaos_long:
        for item in items:
            if "/chaos/" in item.nodeid or item.nodeid.startswith("chaos/"):
                item.add_marker(pytest.mark.timeout(3600), append=False)  # before a test's own


@pytest.fixture(scope="session")
def seed(is_long) -> int:
    """The seed of a run: always the same in the short form, which says whether a change broke something; another one
    each time in the long form, which looks for what nobody has found. RINGCORE_CHAOS_SEED repeats one."""
    drawn = int.from_bytes(os.urandom(4), "little") if is_long else SHORT_SEED
    seed = int(os.environ.get("RINGCORE_CHAOS_SEED") or drawn)
    print(f"\nRINGCORE_CHAOS_SEED={seed}")
    return seed


@pytest.fixture(autouse=True, scope="module")
def only_new_garbage():
    """What the files before have left is not looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def num_malformed(is_long) -> int:
    """Malformed frames, or pages, for each decoder."""
    return 100_000 if is_long else 4_000


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fresh_tmp(tmp_path, monkeypatch):
    """An empty folder that this process, and every process it starts, takes for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
