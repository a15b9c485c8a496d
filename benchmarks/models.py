"""Models of published shapes, as a config.json alone: engines fill them with random weights.

The numbers are those of the config.json that each model was published with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.driver import BenchmarkError

__all__ = ["DEFAULT_MODELS", "MODELS", "PublishedModel", "find_published"]

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_LLAMA_32: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class PublishedModel:
    """A dense decoder. Counts are of numbers, not bytes."""

    name: str
    config: Mapping[str, Any]

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def layer_weights(self) -> int:
        """Of all layers' products; their norms are too few to count."""
        c = self.config
        heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]  # q and o; k and v
        one_layer = c["hidden_size"] * (heads * self.head_dim + 3 * c["intermediate_size"])
        return int(c["num_hidden_layers"] * one_layer)

    @property
    def step_weights(self) -> int:
        """What a decode step reads: the layers and the output matrix. Of the embedding it reads a row a token."""
        return self.layer_weights + int(self.config["hidden_size"] * self.config["vocab_size"])

    @property
    def num_weights(self) -> int:
        """All that is kept: the layers, the embedding, and the output matrix where it is not the same."""
        matrices = 1 if self.config["tie_word_embeddings"] else 2
        return self.layer_weights + matrices * int(self.config["hidden_size"] * self.config["vocab_size"])

    @property
    def kv_numbers_a_token(self) -> int:
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * self.head_dim)

    @property
    def attention_width(self) -> int:
        """Query numbers of a token in all layers: each takes 2 * n * n FLOPs of a prompt of n tokens, causally."""
        c = self.config
        return int(c["num_hidden_layers"] * c["num_attention_heads"] * self.head_dim)

    def write(self, folder: Path) -> Path:
        """A model folder in `folder`, with the config.json alone."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(dict(self.config), indent=1), encoding="utf-8")
        return path


# Families without a native class.
_OLMO2: Mapping[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 500000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "torch_dtype": "bfloat16",
}
_GRANITE: Mapping[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 49159,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 10000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
_GLM4: Mapping[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "torch_dtype": "bfloat16",
}
_PHI4: Mapping[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 100257,
    "eos_token_id": 100265,
    "pad_token_id": 100349,
    "torch_dtype": "bfloat16",
}


def _dense(base: Mapping[str, Any], layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> Any:
    """All of Qwen3 and Llama 3.2 have 8 KV heads."""
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8}
    windows = {"max_window_layers": layers} if base is _QWEN3 else {}
    return {**base, **shape, **windows, "intermediate_size": intermediate, "tie_word_embeddings": tied}


MODELS: dict[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel("Llama-3.2-1B", _dense(_LLAMA_32, 16, 2048, 32, 8192, tied=True)),
        PublishedModel("Qwen3-0.6B", _dense(_QWEN3, 28, 1024, 16, 3072, tied=True)),
        PublishedModel("Qwen3-8B", _dense(_QWEN3, 36, 4096, 32, 12288, tied=False)),
        PublishedModel("Llama-3.2-3B", {**_dense(_LLAMA_32, 28, 3072, 24, 8192, tied=True), "head_dim": 128}),
        PublishedModel("Qwen3-4B", _dense(_QWEN3, 36, 2560, 32, 9728, tied=True)),
        PublishedModel("OLMo-2-7B", _OLMO2),
        PublishedModel("Granite-3.3-8B", _GRANITE),
        PublishedModel("GLM-4-9B", _GLM4),
        PublishedModel("Phi-4", _PHI4),
    )
}
DEFAULT_MODELS = ("Llama-3.2-1B", "Qwen3-0.6B", "Qwen3-8B")  # of a run that names none


def find_published(names: str) -> list[PublishedModel]:
    """The models between commas. Raises `BenchmarkError` listing those there are."""
    found = names.split(",")
    for name in found:
        if name not in MODELS:
            raise BenchmarkError(f"--models {names}: no model {name!r}; there are: {', '.join(MODELS)}", name=name)
    return [MODELS[name] for name in found]
