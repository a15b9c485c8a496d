"""deterministic=True on a GPU: with CUDA graphs and without, 16-bit and quantized weights, two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_schedules import VARIANTS, assert_deterministic
from tiny_checkpoints import hf_model

from ringcore.host.cache_folder import our_cache_folder

ON_GPU = {"device": "cuda", "block_size": 16, "num_blocks_override": 400, "max_num_batched_tokens": 256}
VARIANTS_ON_GPU = [
    {},
    {"max_num_batched_tokens": 33},
    {"steps_in_flight": 2},
    {"enforce_eager": True, "steps_in_flight": 2},
    {"num_blocks_override": 14},
]


def save(folder: Path, family: str, **sizes: int) -> str:
    model = hf_model(family, hidden_size=256, intermediate_size=320, head_dim=64, **sizes)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "Mistral", "Gemma3"])
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int4"}, {"quantization": "fp8"}],
    ids=str,
)
def test_tiny_models(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    options = {"dtype": "bfloat16"} | options
    for variant in VARIANTS_ON_GPU if family == "Llama" else VARIANTS_ON_GPU[1:2]:
        assert_deterministic(save(tmp_path, family), [{}], range(2), **ON_GPU | variant | options)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_mixture_by_tiles_of_few_and_of_many_tokens(tmp_path: Path, quantization: str | None) -> None:
    """Prompts of up to 1,200 tokens in one step beside single ones."""
    options = {"max_model_len": 1280, "num_blocks_override": 1500, "dtype": "bfloat16", "quantization": quantization}
    folder = save(tmp_path, "Qwen3Moe", max_position_embeddings=1280, moe_intermediate_size=128)
    for budget in (700, 4096):
        assert_deterministic(folder, [{}], range(2), 12, **ON_GPU | options | {"max_num_batched_tokens": budget})


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_contexts_of_several_spans(tmp_path: Path, family: str) -> None:
    """Of 128 tokens each: prompts of up to 1,200 tokens, whose decodes are split over the device."""
    options = {"max_model_len": 1280, "num_blocks_override": 1500, "dtype": "bfloat16"}
    folder = save(tmp_path, family, max_position_embeddings=1280)
    for variant in VARIANTS_ON_GPU[:3]:
        assert_deterministic(folder, [{}], range(2), 12, **ON_GPU | variant | options)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_two_ranks(tmp_path: Path, family: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = ON_GPU | {"dtype": "bfloat16", "executor": "multiproc", "tensor_parallel_size": 2}
    assert_deterministic(save(tmp_path, family), VARIANTS[2:3], range(2), **options)


def test_a_real_model() -> None:
    folder = Path(our_cache_folder("smollm2-135m"))
    if not folder.is_dir():
        pytest.skip("SmolLM2-135M is not downloaded")
    for variant in VARIANTS_ON_GPU:
        assert_deterministic(str(folder), [{}], range(2), **ON_GPU | variant | {"dtype": "bfloat16"})
