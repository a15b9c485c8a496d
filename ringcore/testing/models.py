"""Model folders with only a config.json: enough for an engine with fake workers (load_format="dummy")."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["tiny_model_config", "write_model_config"]


def tiny_model_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a two-layer Llama with a vocabulary of 1000 tokens and the EOS token 2.

    `changes` override entries: `tiny_model_config(max_position_embeddings=4096)`.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def write_model_config(folder: str | os.PathLike[str], config: dict[str, Any] | None = None, **changes: Any) -> str:
    """Writes `config` (default: `tiny_model_config(**changes)`) as the folder's config.json, creating the folder.

    Returns the folder, for `EngineConfig.from_options(model=folder, load_format="dummy", ...)`.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    content = (tiny_model_config() if config is None else config) | changes
    (path / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    return str(path)
