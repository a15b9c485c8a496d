"""How the device tells the host what a step sampled: by writing to pinned memory that the host looks at."""

from __future__ import annotations

import time

import numpy as np
import torch

from ringcore.kernels.step_state import RING_HEAD

__all__ = ["ResultRing"]

_SPIN_S = 0.02  # a decoding step takes less: as long as that, waiting costs a core and no latency
_NAP_S = 50e-6
_CHECK_S = 0.1  # how often a wait asks whether the device can still answer


class ResultRing:
    """A slot a step, written by `kernels.step.finish_rows`. Steps are numbered from 1 on, in the order of launches.

    A slot is used again `num_slots` steps later, so a step must be read before that many follow it.
    """

    def __init__(self, max_rows: int, device: torch.device, num_slots: int = 64) -> None:
        self.num_slots = num_slots
        self.num_launched = 0
        self._device = device
        self.words = torch.zeros(
            num_slots, RING_HEAD + max_rows, dtype=torch.int32, pin_memory=device.type == "cuda"
        )  # what `finish_rows` is given
        self._seen = self.words.numpy()
        self._checked = time.monotonic()

    def launched(self) -> int:
        """The number of a step whose `finish_rows` has been launched."""
        self.num_launched += 1
        return self.num_launched

    def is_done(self, number: int) -> bool:
        """Costs less than a microsecond."""
        found = self._seen[(number - 1) % self.num_slots, 0]
        return int(found) & 0xFFFF_FFFF == number & 0xFFFF_FFFF

    def is_over(self, number: int) -> bool:
        """Whether `take` would not wait: the step is done, or will never be."""
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
        """[num_rows] int32 of a step: a token and flags each; a copy. Waits for it.

        Raises RuntimeError where the device failed, or finished its work without the step.
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
                time.sleep(_NAP_S)
        if not self.is_done(number):
            self._check(number)

    def _check(self, number: int) -> None:
        """Raises RuntimeError where the step `number` will never be done."""
        if self._device.type == "cuda":
            is_idle = torch.cuda.current_stream(self._device).query()  # raises what the device failed with
            if not is_idle:
                return
        if not self.is_done(number):
            raise RuntimeError(f"the device has nothing more to do, and step {number} is not done")
