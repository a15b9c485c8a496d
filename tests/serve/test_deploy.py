"""The recipe of an image and the manifest say what the command understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fake_engine import make_model_folder

from ringcore.cli import serve as module
from ringcore.cli.serve import make_serve
from ringcore.serve.access import MONITORING_PATHS

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def container():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in [one["name"] for one in container["ports"]]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["volumes"]}
    return container | {"grace_s": spec["terminationGracePeriodSeconds"]}


def parsed(arguments, monkeypatch) -> dict[str, Any]:
    """What the engines and the server would be given."""
    asked = {}

    async def serve(model, engine, service, listening, restarts, end_s, access_log):
        asked.update(engine, end_s=end_s, batch_dir=service.batch_dir)
        return 0

    monkeypatch.setattr(module, "_serve", serve)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(make_serve())
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 0
    return asked


def test_documented_commands(monkeypatch):
    """Of the guide, as typed, but for the port."""
    guide = (DEPLOY.parent / "docs" / "guide" / "serving.md").read_text()
    commands = re.findall(r"^    ringcore serve (.*)$", guide, re.M)
    assert len(commands) >= 3
    found = [parsed([*shlex.split(command), "--port", "0"], monkeypatch) for command in commands]
    assert {one["data_parallel_size"] for one in found} == {1, 2}


def test_the_arguments_are_the_commands(container, tmp_path, monkeypatch):
    """They are parsed and checked, until the engines would be started."""
    keys = tmp_path / "keys.txt"
    keys.write_text("a-key\n")
    arguments = [str(one).replace("/keys/keys.txt", str(keys)) for one in container["args"]]
    arguments[0] = make_model_folder(tmp_path)
    arguments = ["--host=127.0.0.1" if "--host" in one else "--port=0" if "--port" in one else one for one in arguments]
    asked = parsed(arguments, monkeypatch)
    assert asked["data_parallel_size"] == container["resources"]["limits"]["nvidia.com/gpu"]
    drain_s, delay_s = asked["end_s"]
    assert container["grace_s"] >= drain_s + delay_s + 10
    probe = container["readinessProbe"]
    assert delay_s > probe["periodSeconds"] * probe["failureThreshold"]


def test_the_probes_are_there(container):
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in MONITORING_PATHS


def test_the_image_copies_what_there_is():
    recipe = (DEPLOY / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", recipe, re.M) for path in line.split()]
    assert copied
    assert [path for path in copied if not (DEPLOY.parent / path).exists()] == []
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    (extras,) = re.findall(r"/src\[([\w,]+)\]", recipe)
    assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in project] == []
