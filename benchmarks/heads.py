"""EAGLE-3 heads with random weights, in the shapes of a model: for what a head costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ringcore.checkpoint import find_model
from ringcore.checkpoint.eagle_head import head_tensors, read_eagle_head
from ringcore.checkpoint.model_spec import ModelSpec
from ringcore.checkpoint.spec_reader import read_model_spec
from ringcore.families import FAMILIES

__all__ = ["write_head"]

_MOST_DRAFTED = 32_000  # tokens of the draft vocabulary, as published heads have
_SEED = 0


def write_head(model: Path, folder: Path) -> None:
    """A head of this model in `folder`: of a model without weights config.json alone."""
    dummy = not any(model.glob("*.safetensors"))
    spec = read_model_spec(find_model(model, "dummy"), FAMILIES)
    assert isinstance(spec, ModelSpec), "a native model"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": min(spec.vocab_size, _MOST_DRAFTED),
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "dtype": spec.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if dummy:
        return
    head = read_eagle_head(find_model(folder, "dummy"), spec)
    generator = torch.Generator().manual_seed(_SEED)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in head_tensors(head).items()
    }
    tensors["d2t"] = torch.zeros(head.draft_vocab_size, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors")
