"""`ringcore tune`, with an engine that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_engine import make_model_folder
from typer.testing import CliRunner

from ringcore.cli.app import make_app
from ringcore.errors import ConfigError
from ringcore.front_end import client_start
from ringcore.protocol.kernel_tuning import KernelTuning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("tuning", "code", "said"),
    [
        (KernelTuning(35, 35, 35, 12, 81.25), 0, "35 of 35 shapes known, 35 searched now in 81.2 s, 12 of them faster"),
        (KernelTuning(35, 20, 20, 1, 9.0, "9 s were not enough"), 1, "20 of 35 shapes known"),
        (None, 0, "no kernels with tiles"),
    ],
)
def test_an_engine_is_started_and_ended(folder, monkeypatch, tuning, code, said):
    configs, closed = [], []

    def start(config):
        configs.append(config)
        ready = SimpleNamespace(kernel_tuning=tuning)
        return SimpleNamespace(wait_ready=lambda: ready, ready=ready, close=lambda: closed.append(True))

    monkeypatch.setattr(client_start, "start_client", start)
    flags = ["--seconds", "90", "--load-format", "dummy", "--max-num-seqs", "7"]
    result = CliRunner().invoke(make_app(["tune"]), ["tune", folder, *flags])
    assert (result.exit_code, closed) == (code, [True])
    assert said in result.output
    (config,) = configs
    assert (config.device.kernel_autotune, config.device.kernel_autotune_timeout_s) == (True, 90.0)
    assert config.scheduler.max_num_seqs == 7


def test_what_the_engine_refuses_is_said(folder):
    flags = ["--load-format", "dummy", "--deterministic"]
    result = CliRunner().invoke(make_app(["tune"]), ["tune", folder, *flags])
    assert isinstance(result.exception, ConfigError)
    assert "kernel_autotune chooses tiles by time" in str(result.exception)
