"""Two stages on two GPUs: the tokens of one GPU, eagerly and by graphs, with the next steps under way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens

from ringcore import SamplingParams

pytestmark = pytest.mark.timeout(300)

OPTIONS = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": 1 << 26, "max_num_batched_tokens": 64}
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 5, 16, 17, 40, 130])]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ADJUSTED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=5 + i, max_tokens=12, repetition_penalty=1.0 + i / 10)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {count}")


@pytest.fixture(scope="module")
def alone(tiny_qwen2):
    with make_core(tiny_qwen2, **OPTIONS) as core:
        return tokens(generate(core, PROMPTS, GREEDY)), tokens(generate(core, PROMPTS, ADJUSTED, salt="adjusted"))


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_two_stages_give_the_tokens_of_one_gpu(tiny_qwen2, alone, enforce_eager, model_impl):
    options = OPTIONS | {"enforce_eager": enforce_eager, "model_impl": model_impl, "enable_sleep_mode": True}
    with make_core(tiny_qwen2, pipeline_parallel_size=2, **options) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == alone[0]
        assert tokens(generate(core, PROMPTS, ADJUSTED, salt="adjusted")) == alone[1]
        while max(core.capture_graph().result()):
            continue
        core.sleep()
        core.wake_up()
        assert tokens(generate(core, PROMPTS, GREEDY)) == alone[0]


def test_two_stages_of_two_ranks(tiny_qwen2, alone):
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs 4 GPUs, this machine has {torch.cuda.device_count()}")
    with make_core(tiny_qwen2, pipeline_parallel_size=2, tensor_parallel_size=2, **OPTIONS) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == alone[0]
