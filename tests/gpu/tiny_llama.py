"""A tiny random Llama whose heads are as wide as those of real models, which the kernels of a GPU take."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["save_tiny_llama"]


def save_tiny_llama(folder: str, num_layers: int, num_heads: int, num_kv_heads: int) -> str:
    """320 tokens, 1024 positions, heads of 128, float32. -> the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
