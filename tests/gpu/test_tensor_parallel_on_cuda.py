"""Two and four GPUs: collectives that are exact, with the same bits on every rank; engines with one GPU's tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens
from rank_processes import check_combine, check_graph, check_sums, hammer, on_gpus
from reference import differences
from transformers_models import NEW_TOKENS, saved

from ringcore import SamplingParams

pytestmark = pytest.mark.timeout(300)

OPTIONS = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": 1 << 26, "max_num_batched_tokens": 64}
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 5, 16, 17, 40, 130])]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=[2, 4])
def size(request):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < request.param:
        pytest.skip(f"needs {request.param} GPUs, this machine has {count}")
    return request.param


def test_sums_are_exact_and_the_same_on_every_rank(size, tmp_path):
    results = on_gpus(size, tmp_path, check_sums)
    assert len({digest for _, digest in results}) == 1
    reach = all(torch.cuda.can_device_access_peer(0, peer) for peer in range(1, size))
    assert [has_peer_memory for has_peer_memory, _ in results] == [reach] * size


def test_a_thousand_calls_of_ranks_that_are_late(size, tmp_path):
    assert on_gpus(size, tmp_path, hammer, 1000) == [0] * size


@pytest.mark.parametrize("length", [1024, 32768, 600_000, None], ids=["small", "larger", "large", "by NCCL"])
def test_graphs_of_collectives(size, tmp_path, length):
    assert on_gpus(size, tmp_path, check_graph, length, 60) == [0] * size


def test_combines_are_exact_and_the_same_on_every_rank(size, tmp_path):
    if not all(torch.cuda.can_device_access_peer(0, peer) for peer in range(1, size)):
        pytest.skip("these GPUs do not reach each other's memory")
    results = on_gpus(size, tmp_path, check_combine)
    assert [wrong for wrong, _ in results] == [0] * size
    assert len({digest for _, digest in results}) == 1


def test_whole_experts_with_replicas_that_are_placed_anew(size, tmp_path):
    """In graphs, whose tables change under them. The tokens are those of transformers."""
    model = saved("qwen3_moe", tmp_path)
    prompts = [entry.prompt_token_ids for entry in model.entries]
    options = OPTIONS | {"tensor_parallel_size": size, "expert_balance_steps": 5}
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with make_core(model.path, expert_parallel=True, redundant_experts=size, **options) as core:
        for salt in ("first", "second", "third"):
            found = tokens(generate(core, prompts, greedy, salt=salt))
            assert differences(model.entries, found) == []


@pytest.fixture(scope="module")
def alone(tiny_qwen2):
    """One GPU's tokens: greedy, and drawn with seeds."""
    with make_core(tiny_qwen2, **OPTIONS) as core:
        return tokens(generate(core, PROMPTS, GREEDY)), tokens(generate(core, PROMPTS, seeded(), salt="seeded"))


def seeded():
    return [SamplingParams(temperature=0.8, top_p=0.9, seed=5 + i, max_tokens=12) for i in range(len(PROMPTS))]


def test_graphs_that_are_captured_between_steps(tiny_qwen2, alone, size):
    """All that are missing, on every rank the same ones."""
    with make_core(tiny_qwen2, tensor_parallel_size=size, **OPTIONS) as core:
        first = tokens(generate(core, PROMPTS, GREEDY))
        left = core.ready.num_graphs_left
        while max(told := core.capture_graph().result()):
            assert len(set(told)) == 1
            assert told[0] < left
            left = told[0]
        assert first == tokens(generate(core, PROMPTS, GREEDY, salt="again")) == alone[0]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_engines_give_the_tokens_of_one_gpu(size, tiny_qwen2, alone, enforce_eager):
    """On four ranks its two KV heads are on two ranks each."""
    with make_core(tiny_qwen2, tensor_parallel_size=size, enforce_eager=enforce_eager, **OPTIONS) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == alone[0]
        assert tokens(generate(core, PROMPTS, seeded(), salt="seeded")) == alone[1]
