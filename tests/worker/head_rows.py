"""Drafts of a worker's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from step_driver import admit, execute, make_step, run, start
from tiny_heads import HeadReference, head_tensors

from ringcore.config import EngineConfig
from ringcore.protocol.codec import int_array
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.runner import draft_costs
from ringcore.worker.worker import Worker

__all__ = ["Drafted", "compare_drafts", "drafted", "greedy"]

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33]


class Drafted(NamedTuple):
    """Drafts of a row."""

    row: int
    num_tokens: int
    count: int
    is_behind: bool  # they were computed behind the step before


def compare_drafts(
    worker: Worker,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[list[int], int], list[int]] | None = None,
) -> list[Drafted]:
    """From now on: the drafts of each row, which are compared with plain torch. How many a row has is drawn. model:
    transformers', on the CPU. script: a row's tokens and how many drafts it has -> those that it has in their place."""
    proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
    reference, rng = HeadReference(head_tensors(), model), np.random.default_rng(4)
    draft, found = proposer._draft, []

    def checked(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        drafts: np.ndarray = draft(rows, wanted)
        is_behind = proposer._behind_of(rows[wanted > 0]) is not None
        for row, count, own in zip(rows.tolist(), wanted.tolist(), drafts, strict=True):
            if count:
                tokens = proposer.rows.token_ids[row, : proposer.rows.num_tokens[row]].tolist()
                assert own[:count].tolist() == reference.drafts(tokens, count), (tokens, is_behind)
                found.append(Drafted(row, len(tokens), count, is_behind))
                if script is not None:
                    own[:count] = script(tokens, count)
        return drafts

    def choose(rows: np.ndarray, most: np.ndarray, *_: Any) -> np.ndarray:
        chosen: np.ndarray = np.minimum(most, rng.integers(0, 5, len(rows))) * (rng.random() < 0.8)
        return chosen

    monkeypatch.setattr(proposer, "_draft", checked)
    monkeypatch.setattr(proposer.odds, "choose", choose)
    monkeypatch.setattr(proposer, "_is_worthwhile", lambda: True)
    monkeypatch.setattr(proposer, "may_propose", lambda *_: rng.random() < 0.8)
    return found


def drafted(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[tuple[list[int], Any]]]:
    """What one request writes, and the drafts after which tokens: a prompt in chunks, steps after wrong drafts."""
    monkeypatch.setattr(draft_costs, "COST_SIZES", (1, 2))
    monkeypatch.setattr(HeadProposer, "_is_worthwhile", lambda self: True)
    worker = start(Worker(config, 0, None))
    proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
    found: list[tuple[list[int], Any]] = []
    draft = proposer._draft

    def seen(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        drafts: np.ndarray = draft(rows, wanted)
        found.append(
            (proposer.rows.token_ids[0, : proposer.rows.num_tokens[0]].tolist(), drafts[0, : wanted[0]].tolist())
        )
        return drafts

    monkeypatch.setattr(proposer, "_draft", seen)
    monkeypatch.setattr(proposer.odds, "choose", lambda rows, most, *_: most.copy())
    num_blocks, num_groups = -(-40 // config.cache.block_size), len(set(worker.get_kv_cache_spec().values()))
    blocks = [range(1 + num_blocks * group, 1 + num_blocks * (group + 1)) for group in range(num_groups)]
    run(worker, {0: 4}, new=[admit(0, PROMPT, *blocks)])
    run(worker, {0: 5})
    for _ in range(6):
        execute(worker, msgspec.structs.replace(make_step({0: 1}), max_gained=int_array([5])))
    worker._runner.launcher.follow()  # type: ignore[union-attr]
    written = proposer.rows.token_ids[0, : proposer.rows.num_tokens[0]].tolist()
    worker.shutdown()
    assert len(found) == 6
    return written, found


@torch.inference_mode()
def greedy(model: Any, count: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < count:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens
