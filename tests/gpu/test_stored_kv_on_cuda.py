"""KV beyond a GPU: a working set of several times the device's cache gives the tokens of a cache that holds it all."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens

from ringcore import SamplingParams
from ringcore.testing.models import write_model_config
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.platforms.cuda import CudaPlatform

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "load_format": "dummy", "max_model_len": 1024}
NEW = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[3 + (131 * i + 7 * j + j * j // 3) % 900 for j in range(300 + 40 * i)] for i in range(12)]
TURNS = [random.Random(i).sample(range(12), 6) for i in range(6)]  # those that come together


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64}
    return write_model_config(tmp_path_factory.mktemp("model"), **sizes)


def converse(core) -> list[list[int]]:
    texts, said = [list(prompt) for prompt in PROMPTS], []
    for turn in TURNS:
        for number, new in zip(turn, tokens(generate(core, [texts[i] for i in turn], NEW)), strict=True):
            said.append(new)
            texts[number] = [*texts[number], *new, 5 + number]
    return said


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    with make_core(model, **OPTIONS, num_blocks_override=2000) as core:
        return converse(core)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_turns(model, expected, tmp_path, depth, is_directory, enforce_eager):
    options = OPTIONS | {"num_blocks_override": 130, "max_num_batched_tokens": 512, "host_kv_cache_bytes": 1 << 30}
    options |= {"steps_in_flight": depth, "enforce_eager": enforce_eager}
    if is_directory:
        options["host_kv_cache_dir"] = str(tmp_path)
    with make_core(model, **options) as core:
        assert converse(core) == expected
        found = core.step_metrics().stored_kv
        assert found.num_hit_tokens > 1000
        assert is_directory or not found.num_failed_blocks


def test_copies_beside_the_work_of_the_device(cuda):
    """Of blocks that later work overwrites at once, and back behind it."""
    platform = CudaPlatform()
    memory = torch.randn(6, 400 * 2048, device=cuda)
    pages = BlockPages([layer.view(400, 2048) for layer in memory])
    assert len(pages._views) == 1
    link = platform.block_link(pages)
    host = torch.empty((300, pages.block_bytes), dtype=torch.uint8)
    link.register(host)
    ids = random.Random(0).sample(range(400), 300)
    before, busy = memory.clone(), torch.randn(4096, 4096, device=cuda)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy / 64  # a step in flight
    link.save(ids, list(host))
    memory.zero_()  # the next step
    token = link.load(list(host), ids)
    while not link.is_done(token):
        continue
    expected = torch.zeros_like(before).view(6, 400, 2048)
    expected[:, ids] = before.view(6, 400, 2048)[:, ids]
    assert torch.equal(memory.view(6, 400, 2048), expected)
    link.finish()
    link.unregister(host)
