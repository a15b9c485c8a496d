"""An engine with two workers and no model, for the commands that find it or have its address."""

from __future__ import annotations

import os

import pytest
from admin_peers import ANY_PORT, make_keys
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.front_end.client import EngineCoreClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("models") / f"tiny-{os.getpid()}").mkdir()
    return make_model_folder(folder)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


@pytest.fixture(scope="module")
def engine(folder, keys):
    options = {
        "executor": "fake_engine:FakeMultiproc",
        "tensor_parallel_size": 2,
        "max_model_len": 256,
        "steps_in_flight": 2,
    }
    options |= {"admin_endpoint": ANY_PORT, "admin_keys": keys, "max_worker_restarts": 3}
    with EngineCoreClient(EngineConfig.from_options(model=folder, load_format="dummy", **options)) as client:
        client.wait_ready()
        yield client


@pytest.fixture(scope="module")
def pid(engine):
    return engine.ready.pids["engine"]
