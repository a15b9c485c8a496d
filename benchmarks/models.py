"""Models of published shapes, as a config.json alone: engines fill them with random weights.

The numbers are those of the config.json that each model was published with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.driver import BenchmarkError
from benchmarks.shapes import (
    AWQ_OF_QWEN3,
    DEEPSEEK_V2_LITE,
    FP8_OF_QWEN3,
    FP8_OF_QWEN3_MOE,
    GLM4,
    GPT_OSS_20B,
    GRANITE,
    LLAMA_32,
    OLMO2,
    PHI4,
    QWEN3,
    QWEN3_30B_A3B,
)

__all__ = ["DEFAULT_MODELS", "MODELS", "PublishedModel", "find_published"]

_SCALE_BYTES = 2  # of a group of 4-bit weights, in the checkpoint's own 16 bits


@dataclass(frozen=True)
class PublishedModel:
    """A decoder: dense or with experts, with heads or latent attention. Counts are of numbers where not of bytes.

    Of experts: a step reads those that its tokens are routed to; each token chooses its own at random, all alike.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def _is_latent(self) -> bool:
        return "kv_lora_rank" in self.config

    @property
    def _attention_weights(self) -> int:
        """Of one layer's projections."""
        c = self.config
        heads, hidden = c["num_attention_heads"], c["hidden_size"]
        if not self._is_latent:
            return int(hidden * self.head_dim * 2 * (heads + c["num_key_value_heads"]))  # q and o; k and v
        head, rank = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["kv_lora_rank"]
        expanded = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        return int(
            hidden * heads * (head + c["v_head_dim"]) + hidden * (rank + c["qk_rope_head_dim"]) + rank * expanded
        )

    @property
    def _num_experts(self) -> int:
        """Of a layer that has any."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        return next((int(self.config[name]) for name in names if name in self.config), 0)

    @property
    def _num_dense(self) -> int:
        """Layers with an MLP for every token."""
        layers = self.config["num_hidden_layers"]
        return int(self.config.get("first_k_dense_replace", 0) if self._num_experts else layers)

    def _expert_weights(self, num_experts: float) -> float:
        """Of all layers that have experts, with so many of each; without the router, and those that are shared."""
        c = self.config
        expert = 3 * c["hidden_size"] * c.get("moe_intermediate_size", c["intermediate_size"])
        return float((c["num_hidden_layers"] - self._num_dense) * num_experts * expert)

    @property
    def _other_weights(self) -> float:
        """Of the products of all layers that every token takes: attention, MLPs, routers, and experts that are shared;
        norms are too few to count."""
        c = self.config
        dense = self._num_dense * 3 * c["hidden_size"] * c["intermediate_size"]
        routers = (c["num_hidden_layers"] - self._num_dense) * c["hidden_size"] * self._num_experts
        shared = self._expert_weights(c.get("n_shared_experts", 0))
        return float(c["num_hidden_layers"] * self._attention_weights + dense + routers + shared)

    def _layer_weights(self, num_experts: float) -> float:
        return self._other_weights + self._expert_weights(num_experts)

    @property
    def _head_weights(self) -> int:
        return int(self.config["hidden_size"] * self.config["vocab_size"])

    @property
    def layer_weights(self) -> float:
        """What the layers multiply each token with."""
        return self._layer_weights(self.config.get("num_experts_per_tok", 0))

    @property
    def step_weights(self) -> float:
        """What a decode step multiplies each token with: the layers and the output matrix."""
        return self.layer_weights + self._head_weights

    def step_bytes(self, num_tokens: int, bytes_a_number: int) -> float:
        """What a decode step of so many tokens reads of the weights: the layers and the output matrix, and of experts
        those that are active. Of the embedding it reads a row a token."""
        chosen = self.config.get("num_experts_per_tok", 0) / (self._num_experts or 1)
        active = self._num_experts * (1 - (1 - chosen) ** num_tokens)
        of_experts = self._expert_weights(active) * self._bytes_a_weight(bytes_a_number, is_expert=True)
        of_layers = self._other_weights * self._bytes_a_weight(bytes_a_number, is_expert=False)
        return of_experts + of_layers + self._head_weights * bytes_a_number

    def _bytes_a_weight(self, bytes_a_number: int, *, is_expert: bool) -> float:
        """Of a layer's matrices, scales and zeros with them."""
        packed = self.config.get("quantization_config")
        if packed is None or (packed["quant_method"] == "mxfp4" and not is_expert):
            return bytes_a_number
        if packed["quant_method"] == "mxfp4":
            return 4.25 / 8  # a byte of scale for 32
        if packed["quant_method"] == "fp8":
            rows, columns = packed["weight_block_size"]
            return 1 + 4 / (rows * columns)
        bits = packed["bits"]
        return float(bits / 8 + (_SCALE_BYTES + bits / 8) / packed["group_size"])

    @property
    def num_weights(self) -> float:
        """All that is kept: the layers, the embedding, and the output matrix where it is not the same."""
        matrices = 1 if self.config["tie_word_embeddings"] else 2
        return self._layer_weights(self._num_experts) + matrices * self._head_weights

    @property
    def kv_numbers_a_token(self) -> int:
        """That are kept, of all layers, while the token is within their windows."""
        return int(self.config["num_hidden_layers"] * self._kv_numbers_a_layer)

    @property
    def _kv_numbers_a_layer(self) -> int:
        c = self.config
        if self._is_latent:
            return int(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        return int(2 * c["num_key_value_heads"] * self.head_dim)

    def kv_numbers(self, context: float) -> float:
        """That a decode step reads of the cache of a sequence of so many tokens."""
        return self._kv_numbers_a_layer * sum(min(context, window) for window in self._windows)

    def kv_numbers_of_steps(self, prompt: int, new: int) -> float:
        """That the steps of a completion read: the context grows from `prompt` by `new` tokens."""
        within = [min(new, max(0.0, window - prompt)) for window in self._windows]
        tokens = (
            grown * prompt + grown * grown / 2 + (new - grown) * (0 if grown == new else window)
            for grown, window in zip(within, self._windows, strict=True)
        )
        return self._kv_numbers_a_layer * sum(tokens)

    @property
    def _windows(self) -> list[float]:
        """Of each layer in tokens; infinite where it sees all."""
        layers = self.config["num_hidden_layers"]
        kinds = self.config.get("layer_types") or ["full_attention"] * layers
        return [float(self.config["sliding_window"]) if kind == "sliding_attention" else math.inf for kind in kinds]

    def attention_flops(self, num_tokens: int) -> float:
        """Of a prompt, causally: a token with those before it, or with those of its window."""
        c = self.config
        head = (
            (c["qk_nope_head_dim"] + c["qk_rope_head_dim"] + c["v_head_dim"]) / 2 if self._is_latent else self.head_dim
        )
        seen = (min(num_tokens, window) for window in self._windows)
        pairs = sum(tokens * (num_tokens - tokens / 2) for tokens in seen)
        return float(4 * c["num_attention_heads"] * head * pairs)

    def write(self, folder: Path) -> Path:
        """A model folder in `folder`, with the config.json alone."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(dict(self.config), indent=1), encoding="utf-8")
        return path


def _dense(base: Mapping[str, Any], layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> Any:
    """All of Qwen3 and Llama 3.2 have 8 KV heads."""
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8}
    windows = {"max_window_layers": layers} if base is QWEN3 else {}
    return {**base, **shape, **windows, "intermediate_size": intermediate, "tie_word_embeddings": tied}


_QWEN3_8B = _dense(QWEN3, 36, 4096, 32, 12288, tied=False)
MODELS: dict[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel("Llama-3.2-1B", _dense(LLAMA_32, 16, 2048, 32, 8192, tied=True)),
        PublishedModel("Qwen3-0.6B", _dense(QWEN3, 28, 1024, 16, 3072, tied=True)),
        PublishedModel("Qwen3-8B", _QWEN3_8B),
        PublishedModel("Llama-3.2-3B", {**_dense(LLAMA_32, 28, 3072, 24, 8192, tied=True), "head_dim": 128}),
        PublishedModel("Qwen3-4B", _dense(QWEN3, 36, 2560, 32, 9728, tied=True)),
        PublishedModel("OLMo-2-7B", OLMO2),
        PublishedModel("Granite-3.3-8B", GRANITE),
        PublishedModel("GLM-4-9B", GLM4),
        PublishedModel("Phi-4", PHI4),
        PublishedModel("Qwen3-30B-A3B", QWEN3_30B_A3B),
        PublishedModel("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE),
        PublishedModel("gpt-oss-20b", GPT_OSS_20B),
        PublishedModel("Qwen3-30B-A3B-FP8", {**QWEN3_30B_A3B, "quantization_config": dict(FP8_OF_QWEN3_MOE)}),
        PublishedModel("Qwen3-8B-FP8", {**_QWEN3_8B, "quantization_config": dict(FP8_OF_QWEN3)}),
        PublishedModel("Qwen3-8B-AWQ", {**_QWEN3_8B, "quantization_config": dict(AWQ_OF_QWEN3)}),
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
