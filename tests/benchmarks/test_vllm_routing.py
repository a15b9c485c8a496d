"""How vLLM's dummy weights are filled so that tokens choose experts of their own, on modules that stand for vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

HIDDEN, EXPERTS, K = 256, 32, 4


class VocabParallelEmbedding(torch.nn.Embedding):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class Layer(torch.nn.Module):
    """Attention that adds its bias alone, then a router; as vLLM fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.empty(HIDDEN))
        self.gain = torch.nn.Parameter(torch.empty(HIDDEN))
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        codes = torch.zeros(EXPERTS, 8, 16, dtype=torch.uint8)
        self.w13_weight = torch.nn.Parameter(codes, requires_grad=False)
        self.w13_weight_scale = torch.nn.Parameter(codes[..., 0].clone(), requires_grad=False)


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(100, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.lm_head = ParallelLMHead(100, HIDDEN)

    @torch.no_grad()
    def experts(self, tokens: torch.Tensor) -> list[int]:
        """Different experts that tokens choose, by layer."""
        hidden, found = self.embed_tokens(tokens), []
        for layer in self.layers:
            hidden = hidden + layer.bias
            rows = torch.nn.functional.rms_norm(hidden, (HIDDEN,)) * layer.gain
            found.append(layer.router(rows).topk(K).indices.unique().numel())
        return found


class DummyModelLoader:
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1234))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[DummyModelLoader]:
    """With `vllm_routing` imported, as a worker of vLLM does."""
    parts = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.dummy_loader": {"DummyModelLoader": DummyModelLoader},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        module.__dict__.update(contents, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.vllm_routing", raising=False)
    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)
    import benchmarks.peers.vllm_routing  # noqa: F401

    yield DummyModelLoader()
    sys.modules.pop("benchmarks.peers.vllm_routing", None)


def config(**counts: int) -> Any:
    return SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=HIDDEN, **counts))


def test_tokens_choose_experts_of_their_own(loader: DummyModelLoader) -> None:
    model, tokens = Mixture(), torch.arange(32)
    loader.load_weights(model, config())
    assert max(model.experts(tokens)) < 8, "of a dense model nothing is changed"
    head = model.lm_head.weight.clone()
    loader.load_weights(model, config(num_local_experts=EXPERTS))
    assert min(model.experts(tokens)) > 24
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.layers[0].router.weight, model.layers[1].router.weight)


def test_codes_are_numbers(loader: DummyModelLoader) -> None:
    model = Mixture()
    loader.load_weights(model, config(num_experts=EXPERTS))
    for layer in model.layers:
        assert layer.w13_weight.unique().numel() > 200
        assert layer.w13_weight_scale.unique().tolist() == [120]
