"""Steps of one row and of a few by the persistent kernels, through the whole engine: log-probabilities beside those of
the kernels of each layer and of the CPU, native and by transformers' modules; in FP8 by blocks; after a sleep. The
kernels alone are compared in tests/kernels/test_persistent_layers.py and test_persistent_rows.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine import generate, make_core, tokens
from near import logprob_errors
from quantized_checkpoints import quantize_folder
from tiny_checkpoints import hf_model

from ringcore import SamplingParams
from ringcore.kernels.linears.tma_configs import has_wgmma
from ringcore.kernels.persistent.persistent_layers import PersistentLayers
from ringcore.kernels.persistent.persistent_rows import PersistentRows
from ringcore.model_executor.models.persistent_decoder import PersistentDecoder
from ringcore.worker.memory.cuda_memory import CudaVirtualMemory

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "max_model_len": 768,
    "kv_cache_bytes": 1 << 27,
    "max_num_seqs": 4,
    "dtype": "bfloat16",
    "device": "cuda",
}
MIXTURE = {"mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4}
BLOCK = 128, 128
LENGTHS = (1, 15, 40, 64, 200, 700)


@pytest.fixture(autouse=True)
def _needs_hopper(cuda):
    if not has_wgmma(cuda):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(family: str, block: tuple[int, int] | None = None, **options: Any) -> str:
        folder = str(tmp_path_factory.mktemp(family))
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
        hf_model(family, **sizes | {"max_position_embeddings": 768} | options).save_pretrained(folder)
        if block is not None:
            quantize_folder(Path(folder), block)
        return folder

    return make


def run(folder: str, num_prompts: int, max_tokens: int, at_once: int = 1, **options: Any) -> list[Any]:
    """at_once: prompts that decode together."""
    lengths = itertools.islice(itertools.cycle(LENGTHS), num_prompts)
    prompts = [[3 + (11 * i + j * j) % 90 for j in range(length)] for i, length in enumerate(lengths)]
    greedy = replace(GREEDY, max_tokens=max_tokens)
    with make_core(folder, **OPTIONS | {"max_num_seqs": max(4, at_once)} | options) as core:
        groups = [prompts[first : first + at_once] for first in range(0, num_prompts, at_once)]
        return [one for together in groups for one in generate(core, together, greedy)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"num_key_value_heads": 2}),
        ("Llama", {"head_dim": 64, "attention_bias": False}),
        ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("at_once", [1, 6])
def test_log_probabilities_are_those_of_kernels_of_each_layer(
    monkeypatch, folder_of, family, options, model_impl, at_once
):
    compare(monkeypatch, folder_of(family, **options), model_impl, at_once=at_once)


@pytest.mark.parametrize("normalises", [True, False])
def test_log_probabilities_of_a_mixture(monkeypatch, folder_of, normalises):
    folder = folder_of("Qwen3Moe", num_key_value_heads=1, norm_topk_prob=normalises, **MIXTURE)
    compare(monkeypatch, folder, "native")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"num_key_value_heads": 2}),
        ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 1024}),
        ("Qwen3Moe", MIXTURE | {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_log_probabilities_in_fp8(monkeypatch, folder_of, family, options):
    """An input may be rounded to another code than by the kernels of each layer, so tokens soon differ: a few tokens of
    many prompts."""
    compare(monkeypatch, folder_of(family, BLOCK, **options), "native", num_prompts=60, max_tokens=3, mean=None)


def compare(
    monkeypatch,
    folder: str,
    model_impl: str,
    *,
    num_prompts: int = 6,
    max_tokens: int = 24,
    mean: float | None = 0.05,
    at_once: int = 1,
) -> None:
    """mean: error beside the kernels of each layer, at most; None: any."""
    calls: list[int] = []
    kernel: Any = PersistentLayers if at_once == 1 else PersistentRows
    call = kernel.__call__
    monkeypatch.setattr(kernel, "__call__", lambda self, *given: (calls.append(1), call(self, *given))[1])
    found = run(folder, num_prompts, max_tokens, at_once, model_impl=model_impl)
    assert calls, "the kernel was not launched"
    monkeypatch.setattr(PersistentDecoder, "__call__", lambda self, *given: False)
    others = run(folder, num_prompts, max_tokens, at_once, model_impl=model_impl)
    errors = logprob_errors(found, others)
    exact = run(folder, num_prompts, max_tokens, dtype="float32", device="cpu")
    of_found, of_others = logprob_errors(found, exact), logprob_errors(others, exact)
    assert min(map(len, (errors, of_found, of_others))) > 48
    assert mean is None or errors.mean() < mean
    assert of_found.mean() < 1.2 * of_others.mean() + 0.02


@pytest.mark.parametrize("num_prompts", [1, 5])
def test_after_a_sleep(folder_of, num_prompts):
    """Tags, what is not written yet, and the counter of arrivals go on."""
    refusal = CudaVirtualMemory.refusal(0)
    if refusal is not None:
        pytest.skip(refusal)
    with make_core(folder_of("Qwen3"), **OPTIONS | {"enable_sleep_mode": True}) as core:
        prompts = [[5, 6 + i, 7, 8] for i in range(num_prompts)]
        before = generate(core, prompts, GREEDY)
        core.sleep()
        core.wake_up()
        assert tokens(generate(core, prompts, GREEDY)) == tokens(before)
