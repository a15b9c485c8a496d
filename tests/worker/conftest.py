"""A tiny random Llama and what transformers says it would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

VOCAB_SIZE = 97


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(folder, the transformers model): 3 layers, 4 query and 2 KV heads of 16, positions for 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = LlamaForCausalLM(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="session")
def reference(tiny_llama: tuple[str, Any]) -> Callable[[Sequence[int], int], list[int]]:
    """(prompt, count) -> the greedy continuation, by a whole forward pass a token."""
    model = tiny_llama[1]

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate
