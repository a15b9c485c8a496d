"""Drafts that a GPU's runner computes behind a step, by interpreted kernels and stand-ins for graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_runner import rows_on_device
from fake_graphs import head_graphs_on_cpu
from rows_behind import (
    HEAD_ROWS,
    MAX_LEN,
    check_few_blocks,
    check_many_counts,
    check_other_owners,
    check_prompts_between,
)
from step_driver import make_config, start
from tiny_heads import write_head

from ringcore.worker.drafts.drafts_behind import DraftsBehind
from ringcore.worker.runner import draft_costs
from ringcore.worker.runner.head_places import last_gained, places_at
from ringcore.worker.worker import Worker

FREE = "scripted_drafts:FreeHead"


@pytest.fixture(scope="module")
def worker(tiny_llama: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    speculative = {"method": FREE, "model": write_head(tmp_path_factory.mktemp("head")), "num_drafts": 4}
    options = {"speculative": speculative, "max_num_seqs": HEAD_ROWS, "max_model_len": MAX_LEN}
    config = make_config(tiny_llama[0], **options)
    with pytest.MonkeyPatch.context() as patch:
        rows_on_device(patch, plans_on_device=True)
        head_graphs_on_cpu(patch)
        patch.setattr(draft_costs, "COST_SIZES", (1, 2, 3, 9, 33))
        worker = start(Worker(config, 0, None), num_blocks=1 + HEAD_ROWS * MAX_LEN // 4)
    yield worker
    worker.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_any_number_of_right_drafts(
    worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = check_many_counts(worker, tiny_llama[1], monkeypatch, seed)
    assert sum(one.is_behind for one in found) > 3


@pytest.mark.parametrize("check", [check_few_blocks, check_other_owners, check_prompts_between])
def test_rows(worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    found = check(worker, tiny_llama[1], monkeypatch)
    assert sum(one.is_behind for one in found) >= 4


def test_the_last_place_that_each_row_gained() -> None:
    generator = np.random.default_rng(7)
    for _ in range(50):
        counts = generator.integers(1, 6, generator.integers(1, 7))
        num_gained = np.minimum(generator.integers(0, 6, len(counts)), counts)  # 0: the row had stopped
        firsts = np.cumsum(counts) - counts
        gained = np.concatenate([np.arange(count) < num for count, num in zip(counts, num_gained, strict=True)])
        asked = np.flatnonzero(generator.random(len(counts)) < 0.7)
        padding = np.zeros(2, dtype=np.int64)
        given = (np.concatenate((array[asked], padding)) for array in (firsts, counts))
        found, last = last_gained(torch.tensor(gained, dtype=torch.int32), *(torch.tensor(one).int() for one in given))
        assert found.tolist() == [*num_gained[asked].tolist(), 0, 0]
        assert last[: len(asked)].tolist() == (firsts + np.maximum(num_gained, 1) - 1)[asked].tolist()
        assert last[len(asked) :].tolist() == [0, 0]


def test_places_end_where_the_blocks_do() -> None:
    tables = torch.tensor([[3, 7, 9], [5, 2, 9], [4, 0, 0]], dtype=torch.int32)
    positions, limits = torch.tensor([6, 8, 2]).int(), torch.tensor([8, 8, 4]).int()
    places = places_at(positions, torch.tensor([True, True, False]), limits, tables, 4)
    assert places.tolist() == [[6, 0, 0], [30, 0, 0], [7, 0, 0]]
    places = places_at(places[0] + 1, places[2] > 0, limits, tables, 4)
    assert places.tolist() == [[7, 0, 0], [31, 0, 0], [8, 0, 0]]
    assert not places_at(places[0] + 1, places[2] > 0, limits, tables, 4).any()


def test_drafts_are_found_by_their_rows() -> None:
    token_ids = torch.tensor([[11, 12, 13], [21, 22, 23]])
    behind = DraftsBehind(np.array([5, 0, 3], dtype=np.int32), np.array([16, 8, 32]), token_ids)
    rows = np.array([3, 5], dtype=np.int32)
    assert behind.token_ids(rows).tolist() == [[13, 23], [11, 21]]
    assert behind.num_drafts(rows, np.array([20, 16])).tolist() == [2, 1], "row 5 has no block for its second"
    assert behind.num_drafts(rows, np.array([31, 15])).tolist() == [2, 2]


def test_a_larger_step_is_not_drafted_behind(worker: Worker) -> None:
    runs: Any = worker._runner._stages.proposer._runs  # type: ignore[union-attr]
    rows, ones = np.arange(3, dtype=np.int32), np.ones(3, dtype=np.int64)
    assert runs.draft_behind(rows, ones, ones, num_places=41, num_drafts=2) is None
