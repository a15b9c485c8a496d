"""Graphs of steps of more than 512 tokens: the tokens of steps without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine import generate, make_core
from transformers import LlamaConfig, LlamaForCausalLM

from ringcore import SamplingParams
from ringcore.worker.runner import graph_demand, mixed_graphs

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Steps of up to 1,600 tokens: many short prompts, some long ones, and from the second step on decodes beside them.
PROMPTS = [[2 + (13 * i + 5 * j) % 310 for j in range(20 + 37 * i % 280)] for i in range(48)]
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "max_model_len": 2304,
    "kv_cache_bytes": 1 << 30,
    "max_num_batched_tokens": 2304,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    "device": "cuda",
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2304,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that a graph of `MixedGraphs` computed; a size that is missed is captured at once."""
    monkeypatch.setattr(graph_demand, "_MISSES", 1)
    monkeypatch.setattr(graph_demand, "_STEPS_APART", 0)
    sizes: list[int] = []
    forward = mixed_graphs.MixedGraphs.forward

    def counted(self, inputs, batch):
        sizes.append(len(batch.input_ids))
        return forward(self, inputs, batch)

    monkeypatch.setattr(mixed_graphs.MixedGraphs, "forward", counted)
    return sizes


def tokens(model: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with make_core(model, **{**OPTIONS, **options}) as core:
        return [[one.new_token_ids[0] for one in row] for row in generate(core, prompts, GREEDY)]


def test_the_same_tokens_with_larger_graphs(model: str, replayed: list[int]) -> None:
    budget = {"max_num_batched_tokens": 1600}
    smaller = tokens(model, PROMPTS, **budget, max_cudagraph_capture_size=512)
    assert max(replayed, default=0) <= 512
    replayed.clear()
    larger = tokens(model, PROMPTS, **budget)
    assert max(replayed) > 1024, "steps of more than a thousand tokens were to be graphs"
    same = np.mean([one == other for one, other in zip(smaller, larger, strict=True)])
    assert same >= 0.9, f"{same:.0%} of the prompts"  # padding changes the tiles of prompts, and so the last bits


def test_a_prompt_for_cudnn_has_no_graph(model: str, replayed: list[int]) -> None:
    prompts = [[2 + 7 * j % 310 for j in range(2048)], PROMPTS[1]]
    options = {"dtype": "bfloat16", "max_num_seqs": 1}
    found = tokens(model, prompts, **options)
    assert replayed == [len(PROMPTS[1])]
    assert all(len(row) == GREEDY.max_tokens for row in found)
