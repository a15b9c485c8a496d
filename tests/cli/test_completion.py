"""`ringcore --version`, and completion by the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import ringcore
from ringcore.config import EngineConfig

RUN = "import sys; sys.argv = ['ringcore', *sys.argv[1:]]; from ringcore.cli import main; main()"
ROOT = Path(__file__).parents[2]


def run(*args: str, home: Path, **env: str) -> str:
    """What the command prints, as a script of that name, typed in bash: it finds its shell among its parents."""
    settings = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(
        ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, "-c", RUN, *args],
        capture_output=True,
        text=True,
        env=settings,
        timeout=60,
        check=True,
    )
    return done.stdout


def completions(line: str, home: Path) -> list[str]:
    """What bash is offered for the last word."""
    words = line.split(" ")
    env = {"_RINGCORE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return run(home=home, **env).split()


def test_version(tmp_path):
    code = RUN + "\n"
    out = run("--version", home=tmp_path)
    python = ".".join(map(str, sys.version_info[:3]))
    assert out == f"ringcore {ringcore.__version__} (Python {python}, torch {version('torch')})\n"
    check = code.replace("main()", "\ntry:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", check, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ringcore be", ["bench"]),
        ("ringcore bench s", ["serve"]),
        ("ringcore serve --tensor-p", ["--tensor-parallel-size"]),
        ("ringcore bench serve --request-", ["--request-timeout-s", "--request-rate"]),
    ],
)
def test_commands_and_options_are_completed(tmp_path, line, offered):
    assert completions(line, tmp_path) == offered


def test_every_engine_option_is_completed(tmp_path):
    flags = {f"--{name.replace('_', '-')}" for name in EngineConfig.options() if name != "model"}
    assert flags <= set(completions("ringcore chat --", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_it_is_installed_where_it_is_asked_for_alone(tmp_path):
    shown = run("--show-completion", home=tmp_path)
    assert "_RINGCORE_COMPLETE=complete_bash" in shown
    run("--help", home=tmp_path)
    assert list(tmp_path.iterdir()) == []
    run("--install-completion", home=tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert any("_RINGCORE_COMPLETE=complete_bash" in path.read_text() for path in written)
