"""Drafts by suffix matching against a search of the whole text, privacy of salts, bounds, and how many drafts pay."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringcore.worker.drafts.draft_odds import DraftOdds
from ringcore.worker.drafts.ngram_index import NgramIndex, Queries, TextsOf, ngram_lengths
from ringcore.worker.drafts.shared_texts import SharedTexts
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.drafts.suffix_proposer import SuffixProposer

MAX_LEN, NUM_DRAFTS, MIN_MATCH = 400, 5, 2
FREE = StepCosts((1, 2), (1.0, 1.0))  # a token costs nothing: every draft is verified


class Texts:
    """Rows as far as a proposer reads them."""

    def __init__(self, num_rows: int, *, shared_tokens: int = 0, costs: StepCosts = FREE) -> None:
        self.token_ids = np.zeros((num_rows, MAX_LEN), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        speculation = SimpleNamespace(num_drafts=NUM_DRAFTS, min_match=MIN_MATCH, shared_tokens=shared_tokens)
        config = SimpleNamespace(scheduler=SimpleNamespace(speculation=speculation))
        self.proposer = SuffixProposer(cast(Any, config), cast(Any, self))
        self.proposer.costs = costs

    def admit(self, row: int, tokens: list[int], salt: str | None = None, num_prompt_tokens: int | None = None) -> None:
        self.num_tokens[row] = 0
        self.num_prompt_tokens[row] = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        self.gain(row, tokens)
        self.proposer.admit(cast(Any, SimpleNamespace(row=row, cache_salt=salt)))

    def gain(self, row: int, tokens: list[int]) -> None:
        begin = int(self.num_tokens[row])
        self.token_ids[row, begin : begin + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)

    def find(self, *rows: int) -> list[list[int]]:
        tokens, counts, _ = self.proposer.find(np.array(rows), self.num_tokens[[*rows]])
        return [of_row[:count] for of_row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]

    def propose(self, *rows: int) -> list[list[int]]:
        self.proposer.follow(np.array(rows), self.num_tokens[[*rows]])
        drafts = self.proposer.propose(np.array(rows), np.full(len(rows), NUM_DRAFTS), len(rows))
        ends = np.cumsum(drafts.counts)
        return [drafts.token_ids[end - count : end].tolist() for end, count in zip(ends, drafts.counts, strict=True)]


def expected(text: list[int]) -> list[int]:
    """What followed the last occurrence of the longest indexed n-gram at the end that stood before."""
    for length in reversed(ngram_lengths(MIN_MATCH)):
        if len(text) < length:
            continue
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                rest = text[end:]
                return [rest[place % len(rest)] for place in range(NUM_DRAFTS)]
    return []


def test_drafts_are_what_a_search_of_the_whole_text_finds() -> None:
    rng, rows = random.Random(5), [0, 1, 2]
    texts = Texts(3)
    for _ in range(3):  # rows are used again
        known = {row: [rng.randrange(6 + 30 * row) for _ in range(rng.randint(1, 60))] for row in rows}
        for row in rows:
            texts.admit(row, known[row])
        for _ in range(25):
            asked = rng.sample(rows, rng.randint(1, 3))
            assert texts.find(*asked) == [expected(known[row]) for row in asked]
            for row in asked:
                new = [rng.randrange(6 + 30 * row) for _ in range(rng.randint(1, NUM_DRAFTS + 1))]
                known[row] += new
                texts.gain(row, new)
        texts.proposer.clear(np.array(rows))


def test_numpy_and_c_find_the_same() -> None:
    """Ranks with a compiler and without draft alike: same tables, same places, same collisions."""
    rng = np.random.default_rng(2)
    text = np.resize(rng.integers(0, 6, 130), 3000).astype(np.int32)
    lengths, begins = ngram_lengths(MIN_MATCH), np.array([0, 700, 1500], dtype=np.int64)
    ends, domains = np.array([700, 1500, 2900], dtype=np.int64), np.array([0, 5, 1 << 62], dtype=np.int64)
    indices = [NgramIndex(text, lengths, 1000, native=native) for native in (True, False)]
    if indices[0]._kernels is None:
        pytest.skip("no C compiler")
    texts = TextsOf(np.repeat(domains, 1000), np.repeat(begins, 1000))
    at = rng.integers(300, 700, 200)
    queries = Queries(text, begins[at % 3], begins[at % 3] + at, domains[at % 3])
    longest = []
    for firsts, pasts in ((begins, begins + 300), (begins + 300, ends)):
        for index in indices:
            index.add(begins, firsts, pasts, domains)
        assert np.array_equal(indices[0]._tables, indices[1]._tables)
        for of_place in (None, texts):
            (places, matched), due = (index.find(queries, of_place) for index in indices)
            assert np.array_equal(places, due[0])
            assert np.array_equal(matched, due[1])
            longest.append(matched.max())
    assert longest[:2] == [lengths[-1]] * 2


def test_a_row_without_drafts_is_looked_up_less_often_until_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, texts = random.Random(4), Texts(2)
    phrase = [*range(10, 60)]
    texts.admit(0, phrase[:40])
    texts.admit(1, [5, 6, 7, 8] * 3)
    asked: list[list[int]] = []
    find = texts.proposer.find

    def find_and_note(rows: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        asked.append(rows.tolist())
        return find(rows, known)

    monkeypatch.setattr(texts.proposer, "find", find_and_note)
    for step in range(48):
        texts.propose(0, 1)
        texts.gain(0, [900 + rng.randrange(90000)])
        texts.gain(1, [5 + step % 4])
    of_first = [0 in rows for rows in asked]
    assert sum(of_first) == 8 + 3, "after eight lookups in every sixteenth step"
    assert len(asked) == 48, "the other one has drafts"
    texts.gain(0, phrase[:16])
    drafted = 0
    for token in phrase[16:38]:
        drafted += bool(texts.propose(0)[0])
        texts.gain(0, [token])
    assert drafted > 3
    assert sum(0 in rows for rows in asked[-6:]) == 6


def test_what_others_wrote_is_shared_within_a_salt_alone() -> None:
    texts = Texts(4, shared_tokens=200)
    written = [*range(50, 80)]
    texts.admit(0, [*range(40, 50), *written], salt="a", num_prompt_tokens=10)
    texts.propose(0)
    texts.proposer.clear(np.array([0]))
    for row, salt in enumerate([None, "b", "a", ""]):
        texts.admit(row, [3, 4, 60, 61], salt=salt)
    assert texts.find(0, 1, 2, 3) == [[], [], [62, 63, 64, 65, 66], []]
    texts.admit(1, [3, 4, 42, 43], salt="a")
    assert texts.find(1) == [[]]  # of the prompt, which is not shared


@pytest.mark.parametrize("size", [24, 50])
def test_the_oldest_texts_are_dropped_first_and_no_text_reads_on_into_another(size: int) -> None:
    rng = random.Random(size)
    lengths = ngram_lengths(MIN_MATCH)
    shared = SharedTexts(size, lengths)
    kept: list[tuple[int, list[int]]] = []
    for number in range(40):
        text = [1000 * number + place for place in range(rng.randint(3, 12))]
        shared.add(np.array(text, dtype=np.int32), 0, number % 3)
        kept.append((number % 3, text))
        found = [ask(shared, salt, text[:MIN_MATCH]) for salt, text in kept]
        for (_, text), tokens in zip(kept, found, strict=True):
            assert tokens in ([], text[MIN_MATCH : MIN_MATCH + NUM_DRAFTS])
        assert found[-1]
        held = set(shared._tokens[shared._owners >= 0].tolist())
        first = next(index for index, (_, text) in enumerate(kept) if text[0] in held)
        assert all(held.issuperset(text) for _, text in kept[first:]), "a younger one was dropped before an older one"
        assert not any(found[:first])
        assert sum(len(text) for _, text in kept[first:]) <= size
        assert not ask(shared, (number + 1) % 3, text[:MIN_MATCH])
    assert len(shared._tokens) == size


def ask(shared: SharedTexts, salt: int, tail: list[int]) -> list[int]:
    ends = np.array([len(tail)])
    tokens, _, counts = shared.find(
        Queries(np.array(tail, dtype=np.int32), ends * 0, ends, np.array([salt])), NUM_DRAFTS
    )
    found: list[int] = tokens[0, : counts[0]].tolist()
    return found


def test_drafts_that_are_wrong_or_dear_are_left_out_and_come_back_when_they_pay() -> None:
    rng = random.Random(1)
    texts = Texts(1, costs=StepCosts((1, 2), (1.0, 1.2)))
    phrase = [*range(10, 40)]
    texts.admit(0, [*phrase, *phrase[:8]])
    for _ in range(40):  # pairs that stood before are followed by something new
        texts.propose(0)
        texts.gain(0, [rng.choice(phrase), 900 + rng.randrange(5000)])
        texts.gain(0, phrase[4:6])
    assert texts.propose(0) == [[]]
    texts.gain(0, phrase[6:20])
    drafted = []
    for token in phrase[20:]:
        drafted.append(texts.propose(0)[0])
        texts.gain(0, [token])
    assert drafted[-3] == phrase[-3:][:1] + drafted[-3][1:]


def test_rows_share_what_pays_by_their_odds() -> None:
    odds = DraftOdds(3, NUM_DRAFTS, ngram_lengths(MIN_MATCH))
    rows, none = np.arange(3), np.zeros((3, MAX_LEN), dtype=np.int32)
    for step in range(60):  # row 0 is always right, row 1 every second time, row 2 never
        right = np.array([1, step % 2, 0])[:, None]
        odds.predicted(rows, np.where(right, 0, 7), np.full(3, NUM_DRAFTS), np.full(3, 8), np.full(3, step))
        odds.observe(rows, none, np.full(3, step + 1))
    assert odds.of(rows) == pytest.approx([0.95, 0.5, 0.05], abs=0.1)
    most = np.full(3, NUM_DRAFTS)
    cheap, dear = StepCosts((1, 2), (1.0, 1.001)), StepCosts((1, 2), (1.0, 2.0))
    counts = odds.choose(rows, most, 3, cheap, 1.15).tolist()
    assert counts[0] == NUM_DRAFTS >= counts[1] > counts[2]
    assert odds.choose(rows, most, 3, dear, 1.15).tolist() == [0, 0, 0]
    assert odds.choose(rows, np.array([2, 0, 1]), 3, cheap, 1.15).tolist() == [2, 0, 1]
    slower = StepCosts((1, 2), (1.0, 1.1))
    assert odds.choose(rows, most, 3, slower, 1.15).tolist() == [0, 0, 0], "row 2 would wait for the drafts of others"
    assert odds.choose(rows[:1], most[:1], 1, slower, 1.15).tolist() == [NUM_DRAFTS]
    assert odds.choose(rows, most, 3, cheap, float("inf")).tolist() == [0, 0, 0]


def test_a_disturbed_measurement_costs_no_more_than_a_larger_step() -> None:
    costs = StepCosts((1, 2, 3), (1.0, 9.0, 2.0))
    assert costs.relative(1, 3).tolist() == pytest.approx([1.0, 2.0, 2.0, 2.5])
