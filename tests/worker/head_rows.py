"""Drafts of a worker's head, each compared with those of plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_heads import HeadReference, head_tensors

from ringcore.worker.worker import Worker

__all__ = ["compare_drafts"]


def compare_drafts(worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """From now on: a row, how many tokens it has, and how many drafts, of each row that is drafted for. How many it has
    is drawn. model: transformers', on the CPU."""
    proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
    reference, rng = HeadReference(head_tensors(), model), np.random.default_rng(4)
    draft, found = proposer._runs.draft, []

    def checked(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        drafts: np.ndarray = draft(rows, starts, counts)
        for row, begin, count, own in zip(rows.tolist(), starts.tolist(), counts.tolist(), drafts, strict=True):
            tokens = proposer.rows.token_ids[row, : begin + 1].tolist()
            assert own[:count].tolist() == reference.drafts(tokens, count), tokens
            found.append((row, begin + 1, count))
        return drafts

    def choose(rows: np.ndarray, most: np.ndarray, *_: Any) -> np.ndarray:
        chosen: np.ndarray = np.minimum(most, rng.integers(0, 5, len(rows))) * (rng.random() < 0.8)
        return chosen

    monkeypatch.setattr(proposer._runs, "draft", checked)
    monkeypatch.setattr(proposer.odds, "choose", choose)
    monkeypatch.setattr(proposer, "_is_worthwhile", lambda: True)
    monkeypatch.setattr(proposer, "may_propose", lambda *_: rng.random() < 0.8)
    return found
