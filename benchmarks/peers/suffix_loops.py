"""What drafts cost, without a model: rows that repeat themselves gain tokens, and ask for drafts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ringcore.worker.drafts.suffix_proposer import SuffixProposer

__all__ = ["microseconds"]

MAX_LEN, PERIOD, STEPS = 4096, 1500, 200


def microseconds(num_rows: int, repeats: bool = True) -> float:
    """The median time of a step's drafts, of texts that repeat themselves or that never do."""
    once = np.random.default_rng(0).integers(0, 50_000, (num_rows, PERIOD))
    text = np.tile(once, 3)[:, :MAX_LEN] if repeats else np.arange(num_rows * MAX_LEN).reshape(num_rows, MAX_LEN)
    rows = SimpleNamespace(token_ids=text.astype(np.int32))
    rows.num_tokens, rows.num_prompt_tokens = np.full((2, num_rows), MAX_LEN - 2 * STEPS - 10)
    speculation = SimpleNamespace(num_drafts=8, min_match=3, shared_tokens=1 << 18)
    config = SimpleNamespace(scheduler=SimpleNamespace(speculation=speculation))
    proposer = SuffixProposer(cast(Any, config), cast(Any, rows))
    for row in range(num_rows):
        proposer.admit(cast(Any, SimpleNamespace(row=row, cache_salt=None)))
    asked, most, taken = np.arange(num_rows), np.full(num_rows, 8), []
    for _ in range(STEPS):
        began = time.perf_counter()
        proposer.follow(asked, rows.num_tokens)
        proposer.propose(asked, most, num_rows)
        taken.append(time.perf_counter() - began)
        rows.num_tokens += 2
    return 1e6 * float(np.median(taken[1:]))
