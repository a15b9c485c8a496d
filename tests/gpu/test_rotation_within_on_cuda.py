"""Decode steps whose attention normalises and rotates q and k and writes the cache, through the whole engine: the
log-probabilities of steps with a kernel for it, which are those of the CPU. The kernels alone are compared in
tests/kernels/test_warp_split_decode.py."""

from __future__ import annotations

from typing import Any

import pytest
from engine import generate, make_core
from near import logprob_errors
from tiny_checkpoints import hf_model

from ringcore import SamplingParams
from ringcore.attention.backends import triton_step
from ringcore.attention.backends.triton import TritonBackend

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "max_model_len": 768,
    "kv_cache_bytes": 1 << 27,
    "max_num_seqs": 96,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(family: str, **options: int) -> str:
        folder = str(tmp_path_factory.mktemp(family))
        sizes = {"hidden_size": 256, "intermediate_size": 320, "max_position_embeddings": 768}
        hf_model(family, **sizes, **options).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"head_dim": 128, "num_attention_heads": 8}),
        ("Llama", {"head_dim": 64, "num_attention_heads": 16}),
        ("Mistral", {"head_dim": 64, "num_attention_heads": 6}),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_prompts", [1, 6, 40, 90])
def test_log_probabilities_are_those_of_a_kernel_of_its_own(monkeypatch, folder_of, family, options, num_prompts):
    folder = folder_of(family, **options)
    prompts = [[3 + (11 * i + j * j) % 90 for j in range(2 + 53 * i % 600)] for i in range(num_prompts)]
    calls: list[int] = []
    attend = TritonBackend.forward_unrotated
    monkeypatch.setattr(
        TritonBackend,
        "forward_unrotated",
        lambda self, qkv, *given: (calls.append(len(qkv)), attend(self, qkv, *given))[1],
    )
    found = []
    for most in (triton_step._MAX_ROTATED_ROWS, 0):
        monkeypatch.setattr(triton_step, "_MAX_ROTATED_ROWS", most)
        calls.clear()
        with make_core(folder, **OPTIONS, device="cuda") as core:
            found.append(generate(core, prompts, GREEDY))
        assert bool(calls) == (most > 0)
    errors = logprob_errors(*found)
    assert len(errors) > 8 * num_prompts
    assert errors.mean() < 0.05
    with make_core(folder, **OPTIONS | {"dtype": "float32"}, device="cpu") as core:
        exact = generate(core, prompts[:6], GREEDY)
    assert logprob_errors(found[0][:6], exact).mean() < 1.5 * logprob_errors(found[1][:6], exact).mean() + 0.02
