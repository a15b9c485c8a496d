"""kernel_autotune on a GPU: it searches once, and what a model says stays within the rounding of its products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import generate, make_core
from transformers import LlamaConfig, LlamaForCausalLM

from ringcore import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
PROMPTS = [[2 + (13 * i + 5 * j) % 310 for j in range(5 + 7 * i % 60)] for i in range(40)]
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "max_model_len": 256,
    "kv_cache_bytes": 1 << 28,
    "device": "cuda",
    "dtype": "bfloat16",
    "kernel_autotune_timeout_s": 300.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.04,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def said(model: str, **options: Any) -> tuple[Any, list[list[int]], list[list[float]]]:
    """(What came of the search, tokens, their log-probabilities)."""
    with make_core(model, **{**OPTIONS, **options}) as core:
        outputs = generate(core, PROMPTS, GREEDY)
        tokens = [[one.new_token_ids[0] for one in row] for row in outputs]
        return core.ready.kernel_tuning, tokens, [[one.logprobs[0].logprobs[0] for one in row] for row in outputs]


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}, {"quantization": "fp8"}], ids=str)
def test_it_searches_once_and_says_the_same(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nothing, tokens, logprobs = said(model, **options)
    assert nothing is None
    tuning, tuned, tuned_logprobs = said(model, kernel_autotune=True, **options)
    assert tuning.num_shapes >= 20, "five products in as many ranges of rows as decoding graphs have"
    assert (tuning.num_known, tuning.num_searched) == (tuning.num_shapes, tuning.num_shapes)
    records = [json.loads(path.read_bytes())["tile"] for path in (tmp_path / "ringcore" / "tiles").glob("*.json")]
    assert len(records) == tuning.num_shapes
    assert sum(record["gain"] > 0 for record in records) == tuning.num_faster
    several = [record for record in records if record["num_tried"] > 1]
    assert len(several) > 0.7 * len(records), "other tiles were to be launched and right"
    again, same, _ = said(model, kernel_autotune=True, **options)
    assert (again.num_known, again.num_searched) == (tuning.num_shapes, 0)
    assert again.seconds < 10
    assert np.mean([one == other for one, other in zip(tuned, same, strict=True)]) > 0.9
    errors = [
        abs(a - b)
        for one, other, of_one, of_other in zip(tokens, tuned, logprobs, tuned_logprobs, strict=True)
        for token, another, a, b in zip(one, other, of_one, of_other, strict=True)
        if token == another
    ]
    assert len(errors) > 0.5 * sum(map(len, tokens))
    assert np.mean(errors) < 0.05


def test_without_room_in_its_time_the_next_start_goes_on(model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, _, _ = said(model, kernel_autotune=True, kernel_autotune_timeout_s=2.0)
    assert 0 < first.num_known < first.num_shapes
    assert "the next start goes on" in first.reason
    second, _, _ = said(model, kernel_autotune=True)
    assert (second.num_known, second.num_searched) == (second.num_shapes, second.num_shapes - first.num_known)
