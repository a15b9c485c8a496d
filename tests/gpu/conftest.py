"""Tests that need an NVIDIA GPU; without one each is skipped and says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e"))
sys.path.insert(0, str(HERE.parent / "model_executor"))  # the tiny models and their attention


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU that torch can use"))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda", 0)
