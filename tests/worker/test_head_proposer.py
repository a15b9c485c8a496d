"""How many drafts of a head there are, and for which rows: by what they cost and how often they are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from step_driver import admit, cache_of

from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.worker.drafts.head_features import Due
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.rows.request_rows import RequestRows

MAX_ROWS, MAX_LEN, NUM_DRAFTS = 8, 1600, 4
SIZES = (1, 2, 9, 33)


class FakeRuns:
    """A head that is right where the next tokens are 7."""

    def __init__(self) -> None:
        self.head = SimpleNamespace(tapped=torch.zeros(MAX_LEN, 3))
        self.computed: dict[int, list[int]] = {}  # positions by row
        self.num_drafts = 0

    def compute(self, due: Due) -> None:
        assert len(due.tapped) == due.counts.sum()
        for row, begin, count in zip(*(array.tolist() for array in due[:3]), strict=True):
            self.computed.setdefault(row, []).extend(range(begin, begin + count))

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        for row, begin in zip(rows.tolist(), starts.tolist(), strict=True):
            assert self.computed[row] == [*range(begin)], "a position was left out, or computed twice"
        self.num_drafts += int(counts.sum())
        return np.full((len(rows), int(counts.max())), 7, dtype=np.int32)


class Driven:
    """Rows that decode, as a launcher would have them."""

    def __init__(self, draft_s: float = 0.05, token_s: float = 0.0) -> None:
        config: Any = SimpleNamespace(scheduler=SimpleNamespace(speculation=SimpleNamespace(num_drafts=NUM_DRAFTS)))
        self.rows = RequestRows(MAX_ROWS, cache_of(FullAttentionSpec(4, 1, 8, "float32"), max_model_len=MAX_LEN), 1)
        self.runs = FakeRuns()
        self.proposer = HeadProposer(config, self.rows, self.runs)  # type: ignore[arg-type]
        self.rows.add_listener(self.proposer)
        seconds = [1 + token_s * (size - 1) for size in SIZES]
        self.proposer.learn_costs(StepCosts(SIZES, seconds, draft_seconds=[draft_s] * len(SIZES)))

    def admit(self, row: int) -> None:
        self.rows.admit(admit(row, [1, 2, 3, 4, 5], []))
        rows = np.array([row], dtype=np.int32)
        self.proposer.take(rows, self.rows.num_computed_tokens[rows], np.array([5]))
        self.rows.advance(rows, np.array([5]))
        self.rows.append_tokens(rows, 6)

    def step(self, rows: list[int], token: int) -> int:
        """All rows write `token` from now on -> how many drafts the step verified."""
        scheduled = np.array(rows, dtype=np.int32)
        self.proposer.follow(scheduled, self.rows.num_tokens[scheduled])
        drafts = self.proposer.propose(scheduled, np.full(len(rows), NUM_DRAFTS), len(rows))
        self.proposer.take(scheduled, self.rows.num_computed_tokens[scheduled], 1 + drafts.counts)
        gained = 1 + (drafts.counts if token == 7 else 0 * drafts.counts)
        self.rows.advance(scheduled, None)
        self.rows.append_tokens(scheduled, np.full(int(gained.sum()), token), gained)
        return int(drafts.counts.sum())


def test_drafts_that_are_right_become_as_many_as_there_may_be() -> None:
    driven = Driven()
    driven.admit(0)
    assert [driven.step([0], 7) for _ in range(30)][-5:] == [NUM_DRAFTS] * 5


def test_drafts_that_are_wrong_end_and_are_tried_again_without_being_verified() -> None:
    driven = Driven()
    driven.admit(0)
    found = [driven.step([0], 9) for _ in range(120)]
    assert found[0] > 0
    assert not any(found[20:])
    assert driven.runs.num_drafts <= sum(found) + NUM_DRAFTS * 2, "after 40 tokens, and after 80 more"
    again = [driven.step([0], 7) for _ in range(250)]
    assert again[-1] == NUM_DRAFTS, "they are right, and known to be without being verified"


def test_the_dearer_a_head_is_the_less_often_a_row_is_tried() -> None:
    num_drafts = []
    for draft_s in (0.01, 0.3, 0.9):
        driven = Driven(draft_s)
        driven.admit(0)
        num_verified = sum(driven.step([0], 9) for _ in range(600))
        num_drafts.append(driven.runs.num_drafts - num_verified)
    assert num_drafts == [16, 4, 4], "after 32, 64, 128 and 256 tokens; after 240; after 512"


def test_a_head_that_costs_more_than_it_brings_drafts_nothing() -> None:
    driven = Driven(draft_s=0.9)
    driven.admit(0)
    assert not any(driven.step([0], 7) for _ in range(20))


def test_many_rows_that_rest_are_given_up() -> None:
    driven = Driven(draft_s=0.9)
    for row in range(6):
        driven.proposer._num_admitted = 0  # one of those that are tried
        driven.admit(row)
    assert not any(driven.step([*range(6)], 7) for _ in range(40))
    assert driven.runs.num_drafts == 0
    assert not driven.proposer._features.is_followed.any()
    assert driven.proposer._features.num_pending <= 6 * 40


def test_while_drafts_do_not_pay_one_request_in_sixteen_has_them() -> None:
    driven = Driven(draft_s=0.9)
    followed = []
    for _ in range(33):
        driven.rows.clear()
        driven.admit(0)
        followed.append(bool(driven.proposer._features.is_followed[0]))
    assert [index for index, is_followed in enumerate(followed) if is_followed] == [0, 16, 32]


def test_what_the_engine_asks_for_counts_for_new_requests() -> None:
    driven = Driven()
    for margin, due in ((1.15, True), (16.0, False), (1.15, True)):
        driven.rows.clear()
        driven.admit(0)
        driven.proposer.margin = margin
        driven.step([0], 7)
        driven.proposer.margin = 1.0  # of a step of prompts
        driven.admit(1)
        assert driven.proposer._features.is_followed[1] == due


def test_a_step_that_must_have_none_has_none() -> None:
    driven = Driven()
    driven.admit(0)
    driven.proposer.margin = np.inf
    assert not any(driven.step([0], 7) for _ in range(5))
    driven.proposer.margin = 1.15
    assert driven.step([0], 7) > 0


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_draft_costs_a_run_of_the_head_for_all_rows(num_rows: int) -> None:
    costs = StepCosts((1, 9), (1.0, 1.0), draft_seconds=(0.1, 0.1))
    found = costs.relative(num_rows, 2 * num_rows, num_rows)
    assert found[[0, 1, num_rows, num_rows + 1, 2 * num_rows]].tolist() == pytest.approx([1, 1.1, 1.1, 1.2, 1.2])
