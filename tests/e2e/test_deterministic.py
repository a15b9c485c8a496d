"""deterministic=True: what a request gets, bit for bit, whatever else runs, and however its tokens are cut into steps.

Requests that ask for all that may depend on a batch are run one by one in one engine, and then in others at random
times, among others of random lengths.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine import make_core
from gguf_models import write_gguf
from quantized_checkpoints import KINDS, save_quantized
from random_schedules import (
    ALONE,
    OPTIONS,
    VARIANTS,
    assert_deterministic,
    at_random_times,
    one_by_one,
    random_requests,
)
from tiny_checkpoints import hf_model

from ringcore import EngineConfig
from ringcore.errors import ConfigError
from ringcore.host.cache_folder import our_cache_folder


def save(folder: Path, family: str, **sizes: Any) -> str:
    model = hf_model(family, **sizes)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "Llama")


def test_alone_in_batches_in_chunks_from_a_warm_cache_and_after_preemption(llama: str) -> None:
    assert assert_deterministic(llama, VARIANTS, range(2)) > 0


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("Qwen3Moe", "float32"),
        ("Llama", "bfloat16"),
        *(
            pytest.param(family, dtype, marks=pytest.mark.long_form)
            for family in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Gemma3")
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
)
def test_every_family_and_dtype(tmp_path: Path, family: str, dtype: str, request: pytest.FixtureRequest) -> None:
    is_long = request.node.get_closest_marker("long_form") is not None
    variants, seeds = (VARIANTS, range(4)) if is_long else (VARIANTS[1:2], range(1))
    if family == "Gemma3":  # its two kinds of layers have block tables of their own
        variants = [one | {"num_blocks_override": 110} for one in variants]
    assert_deterministic(save(tmp_path, family), variants, seeds, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", "float32"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.long_form)
            for kind in KINDS
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_quantized(tmp_path: Path, kind: str, dtype: str) -> None:
    save_quantized(tmp_path, hf_model("Llama", hidden_size=128, intermediate_size=256, head_dim=32), kind)
    assert_deterministic(str(tmp_path), VARIANTS[1:2], range(1), dtype=dtype)


@pytest.mark.parametrize("weights", ["packed", pytest.param("packed_int8", marks=pytest.mark.long_form)])
def test_packed_gguf(tmp_path: Path, weights: str) -> None:
    model = hf_model("Llama", hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path, "llama", model, "Q8_0")
    assert_deterministic(path, VARIANTS[1:2], range(1), gguf_weights=weights)


@pytest.mark.long_form
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model(dtype: str) -> None:
    folder = Path(our_cache_folder("smollm2-135m"))
    if not folder.is_dir():
        pytest.skip("SmolLM2-135M is not downloaded")
    assert assert_deterministic(str(folder), VARIANTS, range(2), dtype=dtype) > 0


@pytest.mark.long_form
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_over_ranks_and_after_the_death_of_a_worker(llama: str, options: dict[str, Any]) -> None:
    options = OPTIONS | {"executor": "multiproc", "max_worker_restarts": 1} | options
    requests = random_requests(12, seed=7)
    with make_core(llama, **options | ALONE) as core:
        expected = one_by_one(core, requests)
    with make_core(llama, **options | VARIANTS[1]) as core:
        assert at_random_times(core, requests, 0)[0] == expected
        step, num_steps = core.step, iter(range(1, 1 << 30))

        def kills_in_its_fifth_step() -> Any:
            if next(num_steps) == 5:
                os.kill(core.ready.pids["worker 0"], signal.SIGKILL)
            return step()

        core.step = kills_in_its_fifth_step  # type: ignore[method-assign]
        assert at_random_times(core, requests, 1)[0] == expected
        assert core.num_restarts == 1


# What cannot be promised.


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("model_impl", "transformers", "a LlamaForCausalLM is computed by modules of transformers"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype='fp8' has no batch-invariant attention; give 'auto'"),
        ("attention_backend", "torch_sdpa", "computes a token otherwise in a prompt than decoded; give one of auto"),
        ("kernel_autotune", True, "kernel_autotune chooses tiles by time, and these agree in every bit; leave it out"),
        ("deterministic", "yes", "give True or False"),
    ],
)
def test_what_is_refused(llama: str, option: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        EngineConfig.from_options(model=llama, **OPTIONS | {option: value})
    assert refused.value.details["option"] == "deterministic"
