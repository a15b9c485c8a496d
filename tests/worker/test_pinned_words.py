"""Buffers that a kernel reads in place are not written again before it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcore.worker.rows import pinned_words
from ringcore.worker.rows.pinned_words import PinnedWords


class Event:
    """In place of torch.cuda.Event."""

    log: list[str]
    made: int

    def __init__(self) -> None:
        self.name = Event.made
        Event.made += 1

    def record(self) -> None:
        Event.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        Event.log.append(f"wait {self.name}")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> PinnedWords:
    """Three buffers of four words."""
    monkeypatch.setattr(pinned_words, "_BUFFERS", 3)
    monkeypatch.setattr(pinned_words, "_MIN_WORDS", 4)
    return PinnedWords(torch.device("cpu"))


def fill(pinned: PinnedWords, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    with pinned.filled(np.arange(n, dtype=np.int32), -np.arange(n, dtype=np.int32)) as (first, second):
        assert first[:n].tolist() == list(range(n))
        assert second[:n].tolist() == [-i for i in range(n)]
        return first, second


def test_each_has_its_turn(pinned: PinnedWords) -> None:
    filled = [fill(pinned, n) for n in (4, 2, 3, 1)]
    addresses = [first.data_ptr() for first, _ in filled]
    assert len(set(addresses[:3])) == 3
    assert addresses[3] == addresses[0]
    assert filled[1][0][:2].tolist() == [0, 1], "the one after it wrote elsewhere"


@pytest.mark.parametrize("n", [5, 7, 8, 9, 100])
def test_one_grows_to_what_it_must_hold(pinned: PinnedWords, n: int) -> None:
    first, second = fill(pinned, n)
    assert len(first) == len(second) >= n
    for _ in range(2):
        assert len(fill(pinned, 4)[0]) == 4, "the others are as they were"
    again, _ = fill(pinned, n)
    assert again.data_ptr() == first.data_ptr()


def test_a_buffer_is_filled_after_the_kernel_that_reads_it(
    pinned: PinnedWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    Event.log, Event.made = [], 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(pinned, "_on_gpu", True)
    monkeypatch.setattr(pinned, "_allocate", lambda n: pinned_words._Buffer(torch.empty(2, n, dtype=torch.int32)))
    for number in range(5):
        with pinned.filled(np.array([number], dtype=np.int32), np.array([0], dtype=np.int32)) as (first, _):
            assert first[0] == number
            Event.log.append(f"launch {number}")
    assert Event.log == [
        *("launch 0", "record 0", "launch 1", "record 1", "launch 2", "record 2"),
        *("wait 0", "launch 3", "record 0", "wait 1", "launch 4", "record 1"),
    ]
