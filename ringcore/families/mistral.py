"""Mistral, dense: no biases, and one sliding window for all layers or for none.

A GGUF file has it as a Llama, with its window left out.
"""

from __future__ import annotations

from ringcore.checkpoint.family import Family
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.sliding_windows import FULL, SLIDING

__all__ = ["MISTRAL"]


def _all_layers_or_none(config: Metadata, num_layers: int, given: list[str] | None) -> list[str]:
    kinds = [SLIDING if "sliding_window" in config else FULL] * num_layers
    if given not in (None, kinds):
        raise config.error(
            "layer_types", "differs from sliding_window, which holds for every layer of a Mistral or for none"
        )
    return kinds


MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    model="ringcore.model_executor.models.mistral:MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
    attention_bias=False,
    attention_out_bias=False,
    layer_kinds=_all_layers_or_none,
)
