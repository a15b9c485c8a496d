"""Two ranks over gloo give the tokens of one rank and of transformers."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import count

import pytest
from engine import generate, make_core, tokens
from reference import greedy_tokens

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.config import RankLayout

OPTIONS = {"dtype": "float32", "kv_cache_bytes": 1 << 24}
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 5, 16, 17, 40, 130])]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny_qwen2):
    return greedy_tokens(tiny_qwen2, PROMPTS, 16)


@pytest.mark.parametrize(
    "size", [1, *(pytest.param(size, marks=pytest.mark.long_form) for size in (2, 4))]
)  # two are also below; four: each of its two KV heads is on two ranks
def test_greedy_tokens_equal_transformers(tiny_qwen2, expected, size):
    options = OPTIONS | {"executor": "uniproc" if size == 1 else "multiproc", "max_num_batched_tokens": 64}
    with make_core(tiny_qwen2, tensor_parallel_size=size, **options) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected


def test_another_rank_than_the_first_returns_the_tokens(tiny_qwen2, expected, is_long):
    """In the long form also after it has died and was replaced, as every time a stage in `test_pipeline_parallel`."""
    config = EngineConfig.from_options(model=tiny_qwen2, tensor_parallel_size=2, max_worker_restarts=1, **OPTIONS)
    layout = RankLayout(hosts=config.parallel.layout.hosts, output_rank=1)
    config = replace(config, parallel=replace(config.parallel, ranks=layout))
    with EngineCore(config) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        if not is_long:
            return
        step, num_steps = core.step, count(1)

        def kills_in_its_fifth_step():
            if next(num_steps) == 5:
                os.kill(core.ready.pids["worker 1"], signal.SIGKILL)
            return step()

        core.step = kills_in_its_fifth_step
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        assert (core.num_restarts, core.health().state) == (1, "ready")
        assert "worker 1" in core.health().restart_cause
