"""Rows whose drafts are computed behind the step before, where the head runs by graphs, and what they have to be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from adjusted_model import expected_tokens
from adjusted_requests import EOS, VOCAB_SIZE, Asked
from drafted_rows import NUM_DRAFTS, guess, write
from head_rows import Drafted, compare_drafts
from step_driver import admit, execute, make_step

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.worker.worker import Worker

__all__ = ["HEAD_ROWS", "check_few_blocks", "check_many_counts", "check_other_owners", "check_prompts_between"]

HEAD_ROWS = 6  # of the worker
COUNT = 12
MAX_LEN = 48
PROMPT = [5, 17, 80, 3, 44, 9, 61]


@dataclass
class LongAsked(Asked):
    @property
    def is_done(self) -> bool:
        return len(self.written) >= COUNT or EOS in self.written


def check_many_counts(worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Drafted]:
    """Rows with other numbers of drafts, of which any number is right; two of them end early."""
    rng = random.Random(seed)
    some = [EOS, *(rng.randrange(2, VOCAB_SIZE) for _ in range(5))]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0},
        {"temperature": 1.1},
        {"temperature": 0, "repetition_penalty": 1.8},
        {"temperature": 2.0, "allowed_token_ids": some},
        {"temperature": 1.5, "allowed_token_ids": some, "presence_penalty": 1.0},
    ]
    requests = [
        LongAsked([rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 4, 9]))], SamplingParams(**kind), seed=i)
        for i, kind in enumerate(kinds)
    ]
    due = [
        expected_tokens(model, asked.prompt, asked.params, COUNT, bad_words=[], stops=[EOS], seed=asked.seed)
        for asked in requests
    ]
    texts = [[*asked.prompt, *tokens] for asked, tokens in zip(requests, due, strict=True)]
    found = compare_drafts(worker, model, monkeypatch, guess(texts, 0.7, rng))
    proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
    monkeypatch.setattr(proposer, "may_propose", lambda *_: rng.random() < 0.95)
    write(worker, requests, rng)
    assert [asked.written for asked in requests] == due
    return found


class Rows:
    """Of a worker: each step has as many drafts as there may be, of which the first `num_right` are right."""

    def __init__(self, worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.rows = worker, worker._runner.rows  # type: ignore[union-attr]
        self.proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
        self.num_right, self._model = 0, model
        runs = self.proposer._runs
        self.pages = runs._backend.block_views(runs._layer[1][runs.head.attention.index])  # of the head
        self.found = compare_drafts(worker, model, monkeypatch, self._script)
        monkeypatch.setattr(self.proposer, "may_propose", lambda *_: True)
        monkeypatch.setattr(self.proposer.odds, "choose", lambda rows, most, *_: most.copy())

    def step(self, scheduled: dict[int, int], most: int = NUM_DRAFTS, **delta: Any) -> list[Drafted]:
        """-> its drafts."""
        before = len(self.found)
        step = msgspec.structs.replace(make_step(scheduled, **delta), max_gained=int_array([1 + most] * len(scheduled)))
        execute(self.worker, step)
        return self.found[before:]

    def tokens(self, row: int) -> list[int]:
        self.worker._runner.launcher.follow()  # type: ignore[union-attr]
        known: list[int] = self.rows.token_ids[row, : self.rows.num_tokens[row]].tolist()
        return known

    def _script(self, tokens: list[int], most: int) -> list[int]:
        params = SamplingParams(temperature=0)
        right = expected_tokens(self._model, tokens, params, most, bad_words=[], stops=[])
        return [token if i < self.num_right else (token + 5) % VOCAB_SIZE for i, token in enumerate(right)]


def check_few_blocks(worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """A row has the blocks of its step alone, at last as many tokens as it may have. What it had in this place before
    is not written."""
    rows, size = Rows(worker, model, monkeypatch), worker.config.cache.block_size
    stale = [*range(14, 14 + MAX_LEN // size)]
    rows.step({0: 5}, new=[admit(0, PROMPT[:5], stale)])
    kept = [pages[stale].clone() for pages in rows.pages]
    blocks = [*range(1, 1 + MAX_LEN // size)]
    begun = -(-len(PROMPT) // size)
    rows.step({0: len(PROMPT)}, finished=[0], new=[admit(0, PROMPT, blocks[:begun])])
    counts = []
    for number in range(40):
        num_tokens = len(rows.tokens(0))
        most = min(NUM_DRAFTS, MAX_LEN - 1 - num_tokens)
        if most < 1:
            break
        rows.num_right = (4, 4, 4, 4, 4, 0, 1, 3, 2)[number % 9]
        needed = -(-(num_tokens + most) // size)
        appended = [(0, block) for block in blocks[begun:needed]]
        begun = max(begun, needed)
        found = rows.step({0: 1}, most, blocks=appended)
        counts += [one.count for one in found]
        assert [one.row for one in found] == [0]
    _check_text(rows, 0, PROMPT)
    assert all(torch.equal(pages[stale], before) for pages, before in zip(rows.pages, kept, strict=True))
    worker.reset_rows()
    by_graphs = any(one.is_behind for one in rows.found)
    assert (len(set(counts[:-NUM_DRAFTS])) > 1) == by_graphs, (
        "where blocks end there are fewer drafts, if they are behind"
    )
    return rows.found


def check_other_owners(worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Drafts of a row that was preempted are not those of the next one in its place, and its blocks are another's."""
    rows, size = Rows(worker, model, monkeypatch), worker.config.cache.block_size
    own = MAX_LEN // size
    blocks = [[*range(1 + own * i, 1 + own * (i + 1))] for i in range(3)]
    prompts = [PROMPT, PROMPT[::-1]]
    new = [admit(row, prompts[row], blocks[row]) for row in range(2)]
    rows.step({0: 7, 1: 7}, new=new)
    for rows.num_right in (1, 4, 0):
        rows.step({0: 1, 1: 1})
    # Row 0 is preempted; it goes on in row 2 and in row 1's blocks, and row 1 in row 0 and other ones.
    known = [rows.tokens(0), rows.tokens(1)]
    new = [
        admit(2, known[0], blocks[1], num_prompt_tokens=7),
        admit(0, known[1], blocks[2], num_prompt_tokens=7),
    ]
    rows.step({2: len(known[0]), 0: len(known[1])}, finished=[0, 1], new=new)
    for rows.num_right in (2, 3, 1):
        assert {one.row for one in rows.step({2: 1, 0: 1})} == {0, 2}
    _check_text(rows, 2, PROMPT)
    _check_text(rows, 0, prompts[1])
    worker.reset_rows()
    return rows.found


def check_prompts_between(worker: Worker, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """After a prompt, a step without drafts, one without the row, and one without it that has drafts."""
    rows, size = Rows(worker, model, monkeypatch), worker.config.cache.block_size
    own = MAX_LEN // size
    blocks = [[*range(1 + own * i, 1 + own * (i + 1))] for i in range(3)]
    rows.step({0: 7, 1: 5}, new=[admit(0, PROMPT, blocks[0]), admit(1, PROMPT[:5], blocks[1])])
    for rows.num_right in (3, 2):
        rows.step({0: 1, 1: 1})
    assert rows.step({0: 1, 1: 1, 2: 6}, new=[admit(2, PROMPT[:6], blocks[2])]) == []
    assert _are_behind(rows.step({0: 1, 1: 1, 2: 1})) == set()
    behind = [
        rows.step({0: 1, 1: 1, 2: 1}),
        rows.step({2: 1}),
        rows.step({0: 1, 2: 1}),  # row 0 has taken no step since: it has drafts of before the last
        rows.step({0: 1, 1: 1}),
    ]
    assert [len(found) for found in behind] == [3, 1, 2, 2]
    assert rows.step({0: 1, 1: 1}, most=0) == []
    assert _are_behind(rows.step({0: 1, 1: 1})) == set()
    for row, length in enumerate((7, 5, 6)):
        _check_text(rows, row, PROMPT[:length])
    worker.reset_rows()
    return rows.found


def _are_behind(found: Sequence[Drafted]) -> set[int]:
    return {one.row for one in found if one.is_behind}


def _check_text(rows: Rows, row: int, prompt: list[int]) -> None:
    tokens = rows.tokens(row)
    params = SamplingParams(temperature=0)
    assert tokens[len(prompt) :] == expected_tokens(
        rows._model, prompt, params, len(tokens) - len(prompt), bad_words=[], stops=[]
    )
