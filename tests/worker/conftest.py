"""A tiny random Llama and what transformers says it would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import interpreted_triton  # noqa: F401, before the kernels
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
def tiny_mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """As `tiny_llama`, a Qwen2 of 4 layers. In the transformers model all but the second have a window of 6 tokens; the
    folder says nothing of that."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model = Qwen2ForCausalLM(Qwen2Config(**shape)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("tiny-mixed")
    model.save_pretrained(folder)
    config = Qwen2Config(**shape, use_sliding_window=True, sliding_window=6, layer_types=kinds)
    sliding = Qwen2ForCausalLM(config).float().eval()
    sliding.load_state_dict(model.state_dict())
    return str(folder), sliding


@pytest.fixture(scope="session")
def reference(tiny_llama: tuple[str, Any]) -> Callable[[Sequence[int], int], list[int]]:
    """(prompt, count) -> the greedy continuation, by a whole forward pass a token."""
    return _greedy(tiny_llama[1])


@pytest.fixture(scope="session")
def mixed_reference(tiny_mixed: tuple[str, Any]) -> Callable[[Sequence[int], int], list[int]]:
    return _greedy(tiny_mixed[1])


def _greedy(model: Any) -> Callable[[Sequence[int], int], list[int]]:
    def generate(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate
