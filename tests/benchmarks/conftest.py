from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.driver import ROOT
from benchmarks.harness import EngineSpec, Plan

FAKE = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


@pytest.fixture
def fake_spec() -> Callable[..., EngineSpec]:
    """A fake engine by name; keywords are its settings."""

    def make(name: str = "fake", **settings: Any) -> EngineSpec:
        return EngineSpec(
            name,
            FAKE,
            "import json",
            settings=settings,
            env={"PYTHONPATH": str(ROOT)},
        )

    return make


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(*specs: EngineSpec, rounds: int = 1, **options: Any) -> Plan:
        return Plan(specs, tmp_path, rounds, argparse.Namespace(**options))

    return make


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """An interpreter that runs the fake engine for whatever module, and everything else as it is."""
    file = tmp_path / "python"
    child = Path(__file__).with_name("fake_gpu_child.py")
    file.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
        f"exec {sys.executable} {child}\n"
    )
    file.chmod(0o755)
    return str(file)
