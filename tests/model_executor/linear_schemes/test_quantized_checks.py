"""Quantized checkpoints that are broken: each is refused before a worker starts, and named."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import hf_model

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import check_checkpoint
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

NAME = "model.layers.0.mlp.up_proj"


def filled(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "suffix", "change", "match"),
    [
        ("gptq", "scales", filled(float("nan")), "has a scale that is infinite or no number; download it again"),
        ("awq", "scales", lambda t: filled(float("inf"))(t.bfloat16()), "has a scale that is infinite"),
        ("w4", "weight_scale", lambda t: t[:, :1], r"has the shape \[96, 1\], the configuration asks for \[96, 2\]"),
        ("w4", "weight_packed", lambda t: t.float(), "is F32, compressed-tensors has it in I32"),
        (
            "fp8 channel",
            "weight",
            lambda t: t.to(torch.float8_e5m2),
            "is F8_E5M2, compressed-tensors has it in F8_E4M3",
        ),
        ("fp8 channel", "weight_scale", lambda t: None, "is missing"),
        ("gptq order", "g_idx", filled(2), "has group 2 of 2"),
        ("gptq order", "g_idx", filled(-1), "has group 1 of 2"),
        ("gptq", "g_idx", filled(1), "is not in order, but 'desc_act' is false"),
        ("w4", "weight_shape", filled(72), r"says \[96, 72\], its packed weights are \[96, 8\]"),
    ],
)
def test_a_broken_tensor_is_named(tmp_path, kind, suffix, change, match):
    save_quantized(tmp_path, hf_model("Llama", num_hidden_layers=2, intermediate_size=96), kind)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"{NAME}.{suffix}"
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed.contiguous()}, tmp_path / "model.safetensors")
    files = find_model(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}' {match}"):
        check_checkpoint(files, read_model_spec(files, FAMILIES), FAMILIES)


def test_a_config_that_ignores_a_quantized_matrix(tmp_path):
    save_quantized(tmp_path, hf_model("Llama", num_hidden_layers=2, intermediate_size=96), "w4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"].append(NAME)
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = find_model(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"'{NAME}.weight' is missing"):
        check_checkpoint(files, read_model_spec(files, FAMILIES), FAMILIES)
