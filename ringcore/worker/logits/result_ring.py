"""The ring buffer by which the device reports sampled tokens: kernels write pinned host memory, the host polls it."""

from __future__ import annotations

import time

import numpy as np
import torch

from ringcore.kernels.steps.step_state import RING_HEAD

__all__ = ["ResultRing"]

_SPIN_S = 0.02  # longer than a decoding step: the host spins this long, which costs a core but no latency
_SLEEP_S = 50e-6
_CHECK_S = 0.1  # how often a wait checks that the device still has work


class ResultRing:
    """One slot per step; producer: `kernels.step.finish_rows` on the device, consumer: the host. Steps are numbered
    from 1 on, in launch order, and a slot's first word is the number of the step that it holds.

    The ring wraps around after `num_slots` steps, so a step must be read before that many follow it.
    """

    def __init__(self, max_rows: int, device: torch.device, num_slots: int = 64) -> None:
        self.num_slots = num_slots
        self.num_launched = 0
        self._device = device
        # [num_slots, RING_HEAD + max_rows], pinned: the argument of `finish_rows`.
        self.words = torch.zeros(num_slots, RING_HEAD + max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._seen = self.words.numpy()
        self._checked = time.monotonic()

    def launched(self) -> int:
        """Counts a launched `finish_rows`; -> the number of its step."""
        self.num_launched += 1
        return self.num_launched

    def is_done(self, number: int) -> bool:
        """Polls the slot; costs less than a microsecond."""
        found = self._seen[(number - 1) % self.num_slots, 0]
        return int(found) & 0xFFFF_FFFF == number & 0xFFFF_FFFF

    def is_over(self, number: int) -> bool:
        """Whether `take` would return or raise at once: the step is done, or will never be."""
        if self.is_done(number):
            return True
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return False
        self._checked = now
        try:
            self._check(number)
        except RuntimeError:
            return True
        return False

    def take(self, number: int, num_rows: int) -> np.ndarray:
        """Waits for a step; -> a copy of its words [num_rows] int32, each a token id and flags.

        Raises RuntimeError where the device failed, or became idle without finishing the step.
        """
        assert self.num_launched - self.num_slots < number <= self.num_launched, (number, self.num_launched)
        self._wait(number)
        row = self._seen[(number - 1) % self.num_slots]
        words: np.ndarray = row[RING_HEAD : RING_HEAD + num_rows].copy()
        return words

    def _wait(self, number: int) -> None:
        started = time.monotonic()
        while not self.is_over(number):
            if time.monotonic() - started > _SPIN_S:
                time.sleep(_SLEEP_S)
        if not self.is_done(number):
            self._check(number)

    def _check(self, number: int) -> None:
        """Raises RuntimeError where the step `number` will never be done."""
        if self._device.type == "cuda":
            is_idle = torch.cuda.current_stream(self._device).query()  # raises the device's error
            if not is_idle:
                return
        if not self.is_done(number):
            raise RuntimeError(f"the device is idle, and step {number} is not done")
