"""The models that `packed_load` writes are loaded as published ones are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models import MODELS
from benchmarks.packed_load import FORMATS, load, write_model
from ringcore.checkpoint import find_model
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.families import FAMILIES

SMALL = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "bos_token_id": 1}


@pytest.mark.parametrize("name", ["Q4_K", "AWQ", "FP8"])
def test_models_are_written_and_loaded(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path, name, {**MODELS[FORMATS[name]].config, **SMALL, "eos_token_id": 2})
    assert load(model) > 0
    gate = "model.layers.0.mlp.gate_proj"
    if name == "Q4_K":
        assert GGUFTensors(model, FAMILIES).kinds()[f"{gate}.weight"] == "Q4_K"
        return
    assert find_model(str(model)).weight_files
    stored = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert (f"{gate}.qweight" in stored) == (name == "AWQ")
