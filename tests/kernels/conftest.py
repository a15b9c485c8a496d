"""Kernels run compiled where there is a GPU, and in Triton's interpreter, on the CPU, where there is none."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it is read then


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        for item in items:
            if "kernels" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
