"""The options of ranks on other hosts: what goes together, and what each lacks."""

from __future__ import annotations

import pytest
from fake_engine import make_model_folder

from ringcore.config import EngineConfig
from ringcore.config.admin_keys import create_keys
from ringcore.errors import ConfigError

ENDPOINT = "tcp://10.0.0.1:5700"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return create_keys(tmp_path_factory.mktemp("join") / "keys")


def make(folder, **options):
    options = {"tensor_parallel_size": 2, "hosts": ["localhost", "b"], "join_endpoint": ENDPOINT} | options
    return EngineConfig.from_options(model=folder, load_format="dummy", **options)


def test_the_host_of_each_rank(folder, keys):
    layout = make(folder, join_keys=keys).parallel.layout
    assert (layout.hosts, layout.output_rank) == (("localhost", "b"), 0)
    assert [layout.local_rank(rank) for rank in (0, 1)] == [0, 0]
    staged = make(folder, join_keys=keys, pipeline_parallel_size=2, hosts=["localhost", "localhost", "b", "b"])
    layout = staged.parallel.layout
    assert (layout.output_rank, [layout.local_rank(rank) for rank in range(4)]) == (2, [0, 1, 0, 1])
    one = EngineConfig.from_options(model=folder, load_format="dummy", hosts=["localhost"])
    assert one.parallel.layout.hosts == ("localhost",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": ["localhost"]}, r"^join_endpoint=.*give hosts with them too"),
        ({"hosts": ["b"]}, r"^hosts=.*give 2 names"),
        ({"pipeline_parallel_size": 2}, r"^hosts=.*give 4 names"),
        ({"hosts": "b"}, r"^hosts='b': give a list of names"),
        ({"hosts": ["b", ""]}, r"^hosts=.*give a list of names"),
        ({"join_endpoint": None}, r"^hosts=.*give join_endpoint too"),
        ({"join_keys": None}, r"^hosts=.*give join_keys too"),
        ({"join_endpoint": "10.0.0.1"}, r"^join_endpoint='10.0.0.1': give tcp://HOST:PORT"),
        ({"join_endpoint": "tcp://*:5700"}, r"^join_endpoint=.*the address of this host that the others reach"),
        ({"join_endpoint": "tcp://0.0.0.0:5700"}, r"^join_endpoint=.*the address of this host that the others reach"),
        ({"join_keys": "/no/such/folder"}, r"^join_keys=.*no such directory"),
        ({"large_messages": "tcp"}, r"^large_messages='tcp': give one of memfd, zmq"),
    ],
)
def test_what_does_not_go_together(folder, keys, options, text):
    with pytest.raises(ConfigError, match=text):
        make(folder, **{"join_keys": keys} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": ["b", "c"]}, r"^hosts=.*Ray finds hosts and GPUs; leave it out"),
        ({"join_keys": "/keys"}, r"^join_keys=.*leave it out"),
        ({"device_ids": [0, 1], "device": "cuda"}, r"^device_ids=.*leave it out"),
        ({"join_endpoint": "tcp://*:5700"}, r"^join_endpoint=.*the address of this host that the others reach"),
        ({"ray_address": "ray://head:10001"}, r"^ray_address=.*give HOST:PORT of the cluster's head"),
        ({"ray_resources": {"GPU": 2}}, r"^ray_resources=.*of GPUs one"),
        ({"ray_resources": {"CPU": 0}}, r"^ray_resources=.*amounts above 0"),
        ({"ray_runtime_env": "pip"}, r"^ray_runtime_env=.*give a dict"),
        ({"ray_timeout_s": 0}, r"^ray_timeout_s=0: give a positive number of seconds"),
        ({"executor": "multiproc", "ray_address": "head:6379"}, r"^ray_address=.*it is for executor='ray'"),
    ],
)
def test_what_does_not_go_together_with_ray(folder, monkeypatch, options, text):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=text):
        make_with_ray(folder, **options)


def make_with_ray(folder, **options):
    options = {"executor": "ray", "tensor_parallel_size": 2} | options
    return EngineConfig.from_options(model=folder, load_format="dummy", **options)


def test_ray_finds_the_hosts_when_it_starts(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    parallel = make_with_ray(folder, ray_resources={"GPU": 1, "CPU": 2}, join_endpoint=ENDPOINT).parallel
    assert (parallel.layout.world_size, set(parallel.layout.hosts)) == (2, {"unplaced"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(ConfigError, match=r"^executor='ray': Ray is not installed; run pip install 'ringcore\[ray\]'"):
        make_with_ray(folder)
