"""Rows that share a prefix through the whole engine on a GPU: as near to the float32 of a CPU as rows that each read
their own. The kernels alone are compared in tests/kernels/test_cascade_attention.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core
from near import logprob_errors
from tiny_llama import save_tiny_llama

from ringcore import SamplingParams
from ringcore.attention.backends.triton import TritonBackend
from ringcore.kernels.attention import prefix_tiling
from ringcore.kernels.attention.prefix_tiling import PrefixTiling

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
NUM_ROWS = 64
# Two system prompts, and rows without one.
PREFIXES = [[3 + (7 * j + j // 5) % 300 for j in range(900)], [5 + (11 * j + j // 3) % 300 for j in range(900)]]
PROMPTS = [
    ([] if i % 12 == 0 else PREFIXES[i % 3 == 2]) + [2 + (13 * i + 5 * j) % 310 for j in range(1 + 7 * i % 90)]
    for i in range(NUM_ROWS)
]
OPTIONS: dict[str, Any] = {"executor": "uniproc", "max_model_len": 1024, "kv_cache_bytes": 1 << 30}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_llama(str(tmp_path_factory.mktemp("llama")), num_layers=3, num_heads=16, num_kv_heads=8)


@pytest.fixture(scope="module")
def on_a_cpu(model):
    with make_core(model, **OPTIONS, device="cpu", dtype="float32") as core:
        return generate(core, PROMPTS, GREEDY)


@pytest.fixture
def num_shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each step with many decodes that was launched kernel by kernel: the rows that are in a group. A tenth of what
    pays is enough for one here."""
    monkeypatch.setattr(prefix_tiling, "_MIN_SAVED_BYTES", 38 << 20)
    counts: list[int] = []
    plan = TritonBackend._plan_decodes

    def counted(self, *args, **options):
        planned = plan(self, *args, **options)
        if planned.shared is not None and not torch.cuda.is_current_stream_capturing():
            counts.append(int(planned.shared.tiles.count_nonzero()))
        return planned

    monkeypatch.setattr(TritonBackend, "_plan_decodes", counted)
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"enforce_eager": True, "steps_in_flight": 1},
        {"max_num_batched_tokens": 256},
        {"max_num_seqs": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_as_near_as_rows_that_read_their_own(model, on_a_cpu, options, dtype, num_shared, monkeypatch):
    settings = {**OPTIONS, "device": "cuda", "dtype": dtype, **options}
    with make_core(model, **settings) as core:
        together = [logprob_errors(generate(core, PROMPTS, GREEDY), on_a_cpu) for _ in range(2)]
        assert core.stats().num_prefix_hit_tokens
    if "enforce_eager" in options:
        assert max(num_shared) > 0.75 * NUM_ROWS, "both groups were to be read together"
    monkeypatch.setattr(PrefixTiling, "choose", lambda *_: None)
    with make_core(model, **settings) as core:
        apart = logprob_errors(generate(core, PROMPTS, GREEDY), on_a_cpu)
    for found in together:
        assert len(found) > 0.8 * len(apart)
        assert found.mean() < 1.3 * apart.mean() + 1e-4
        assert np.quantile(found, 0.99) < 1.5 * np.quantile(apart, 0.99) + 1e-3


@pytest.mark.usefixtures("num_shared")
def test_the_same_tokens_in_a_graph_and_without(model):
    """The same kernels by the same plans: the same bits, however a step is launched."""
    found = []
    for is_eager in (False, True):
        options = {**OPTIONS, "device": "cuda", "dtype": "bfloat16", "enforce_eager": is_eager}
        with make_core(model, **options, steps_in_flight=1) as core:
            generate(core, PROMPTS, GREEDY)  # all prompts are cached from here on, and all rows start together
            outputs = generate(core, PROMPTS, GREEDY)
            found.append([[one.new_token_ids[0] for one in row] for row in outputs])
    same = sum(one == other for one, other in zip(*found, strict=True))
    assert same >= 0.9 * NUM_ROWS, f"{same} of {NUM_ROWS} rows"  # padding of graphs changes the tiles of products
