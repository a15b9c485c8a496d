"""Tiny random checkpoints, each made once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import interpreted_triton  # noqa: F401, before the kernels
import pytest
from tiny_checkpoints import hf_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, rope, max_shard_size=None, **config) -> (transformers model, folder)."""

    @functools.cache
    def make(family: str, rope: str = "default", max_shard_size: str = "1GB", **overrides: Any) -> tuple[Any, Path]:
        model = hf_model(family, rope, **overrides)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model, folder

    return make
