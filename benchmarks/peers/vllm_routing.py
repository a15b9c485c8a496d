"""Dummy weights of vLLM by which each token chooses experts of its own.

All that vLLM fills is uniform within 1e-3, with one seed for every tensor of a size: gains, biases and embeddings
too. A router's bias is then some 30 times what its product gives, and biases of attention, alike in all layers, soon
outweigh what tells one token's hidden state from another's. Tokens of gpt-oss so choose the same experts, and a step
of 32 rows reads fewer weights than a trained model's does. What are no floats, codes and scales of 4 bits, stays as
memory was.

`worker_extension_cls` names `Routing`: vLLM imports this module in each worker, before it loads a model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

__all__ = ["Routing", "spread"]

_GAIN = 1e-3  # of the norm before a router, at most
_EMBEDDING = 1000  # times as large
_SEED = 0  # on every rank: routers are replicated
_EXPONENT = 120  # of a block of 32 codes: 2 ** (120 - 127)
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")

_load_weights = DummyModelLoader.load_weights


class Routing:
    """Adds nothing to a worker: it is there to be imported."""


def spread(model: torch.nn.Module, config: Any) -> int:
    """Of a mixture: embeddings that outweigh what layers add, routers with logits as large as a trained model's and
    without biases, and numbers for codes of 4 bits. config: the text model's, of transformers. Returns the number of
    routers."""
    num_experts = next((int(getattr(config, name)) for name in _COUNTS if getattr(config, name, None)), 0)
    if not num_experts:
        return 0
    bound = math.sqrt(3 / config.hidden_size) / _GAIN
    routers = 0
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            module.weight.data.mul_(_EMBEDDING)
        own = dict(module.named_parameters(recurse=False))
        weight = own.pop("weight", None)
        if weight is not None and weight.shape == (num_experts, config.hidden_size):
            generator = torch.Generator(weight.device).manual_seed(_SEED + routers)
            weight.data.uniform_(-bound, bound, generator=generator)
            for bias in own.values():
                bias.data.zero_()
            routers += 1
        for name, codes in own.items():
            if codes.dtype == torch.uint8:
                codes.data.fill_(_EXPONENT) if name.endswith("scale") else codes.data.random_(256)
    return routers


def _load_and_spread(self: DummyModelLoader, model: torch.nn.Module, model_config: Any) -> None:
    _load_weights(self, model, model_config)
    spread(model, model_config.hf_text_config)


DummyModelLoader.load_weights = _load_and_spread  # type: ignore[method-assign]
