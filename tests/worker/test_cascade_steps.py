"""Rows that share a prefix, through the GPU runner and its attention in Triton's interpreter: decoding and mixed
steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runner import rows_on_device
from transformers import LlamaConfig, LlamaForCausalLM

from ringcore import SamplingParams
from ringcore.attention.backends import BACKENDS
from ringcore.worker.platforms.cpu import CpuPlatform

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
PREFIXES = [[(7 * j + j // 5) % 60 + 2 for j in range(280)], [(11 * j + j // 3) % 60 + 2 for j in range(150)]]
PROMPTS = [
    ([] if i % 6 == 5 else PREFIXES[i % 3 == 2]) + [2 + (13 * i + 5 * j) % 60 for j in range(1 + 5 * i % 37)]
    for i in range(14)
]
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "block_size": 16,
    "kv_cache_bytes": 1 << 24,
}


@pytest.mark.long_form
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}], ids=str)
def test_tokens_are_those_of_rows_that_read_their_own(tmp_path, monkeypatch, options):
    from ringcore.attention.backends.triton import TritonBackend
    from ringcore.kernels.attention import prefix_tiling

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with make_core(str(tmp_path), **OPTIONS, **options, dtype="float32") as core:
        expected = generate(core, PROMPTS, GREEDY)

    class Interpreted(TritonBackend):
        @classmethod
        def refusal(cls, *args, **kwargs):
            return None

        def _plan_decodes(self, *args, **kwargs):
            planned = super()._plan_decodes(*args, **kwargs)
            if planned.shared is not None:
                num_shared.append(int(planned.shared.tiles.count_nonzero()))
            return planned

    num_shared: list[int] = []
    rows_on_device(monkeypatch, plans_on_device=False)
    for name in CpuPlatform.attention_backends[:2]:  # of heads
        monkeypatch.setitem(BACKENDS, name, Interpreted)
    monkeypatch.setattr(prefix_tiling, "_MIN_SAVED_BYTES", 1)
    with make_core(str(tmp_path), **OPTIONS, **options, dtype="float16") as core:
        for _ in range(2):
            for got, wanted in zip(generate(core, PROMPTS, GREEDY), expected, strict=True):
                for one, other in zip(got, wanted, strict=True):
                    assert one.new_token_ids == other.new_token_ids
                    assert one.logprobs[0].logprobs[0] == pytest.approx(other.logprobs[0].logprobs[0], abs=0.05)
    assert max(num_shared) == 10, "both groups, and four rows with little or nothing in common"
