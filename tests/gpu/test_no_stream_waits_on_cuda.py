"""No step waits for the stream: whole steps of every kind under the sync debug mode of torch, which raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core
from tiny_checkpoints import hf_model

from ringcore import SamplingParams
from ringcore.worker.worker import Worker

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 1},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 2},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tiny")
    model = hf_model("Llama", hidden_size=256, intermediate_size=320, head_dim=64)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 256, "block_size": 16}
    with make_core(str(folder), num_blocks_override=400, **options) as engine:
        yield engine


@contextmanager
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the launch of a step; what reads its result waits for the ring of results, or for an event."""
    launch = Worker.execute_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute_model", watched)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_chunks_and_decodes(core: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Once as it is, so that libraries and kernels are there."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **KINDS[kind])
    for warm in (False, True):
        prompts = [rng.integers(5, 90, rng.integers(1, 140)).tolist() for _ in range(12)]
        if not warm:
            generate(core, prompts, params)
            continue
        with no_waits(monkeypatch):
            outputs = generate(core, prompts, params, salt=kind)
        assert all(one[-1].error is None for one in outputs)
        assert all(sum(len(output.new_token_ids) for output in one) == 12 for one in outputs)
