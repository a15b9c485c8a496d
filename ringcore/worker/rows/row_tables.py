"""Tables on the device with a place for each row that needs one: how often tokens were seen, and which may be sampled.

A table is there from its first row on and grows by doubling, up to a place for every row. A launch may still read a
table when it grows: memory is given back in the order of the device's work.
"""

from __future__ import annotations

import numpy as np
import torch

from ringcore.model_executor.logit_adjustments import reset_counts
from ringcore.worker.rows.upload import upload

__all__ = ["CountTable", "MaskTable", "bar_tokens", "mask_of", "table_bytes"]

ALL_BITS = -1  # a word of a mask that bars nothing


def table_bytes(max_rows: int, vocab_size: int) -> int:
    """The most that both tables take of the device: while one grows to its full size, the one before is still there."""
    size_before = (1 << (max_rows - 1).bit_length()) // 2
    return (max_rows + size_before) * 4 * (vocab_size + -(-vocab_size // 32))


def mask_of(vocab_size: int, token_ids: np.ndarray) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32, the bits of these tokens [n] set."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    np.bitwise_or.at(words, token_ids >> 5, np.uint32(1) << (token_ids & 31).astype(np.uint32))
    return words.view(np.int32)


def bar_tokens(words: np.ndarray, token_ids: np.ndarray) -> None:
    """Clears the bits of these tokens [n] in words [num_words] int32."""
    words &= ~mask_of(32 * len(words), token_ids)


class _Slots:
    """Which place each row has. 0 <= a place < size, and no two rows have the same."""

    def __init__(self, max_rows: int) -> None:
        self.of_row = np.full(max_rows, -1, dtype=np.int32)
        self.size = 0  # places so far
        self._free: list[int] = []

    def take(self, row: int) -> int:
        assert self.of_row[row] < 0, f"row {row} has a place"
        if not self._free:
            size = min(max(1, 2 * self.size), len(self.of_row))
            self._free += range(size - 1, self.size - 1, -1)
            self.size = size
        slot = self._free.pop()
        self.of_row[row] = slot
        return slot

    def release(self, row: int) -> None:
        if self.of_row[row] >= 0:
            self._free.append(int(self.of_row[row]))
            self.of_row[row] = -1


class _Table:
    """[size, width] int32 on the device; what new places hold is arbitrary."""

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._slots = _Slots(max_rows)
        self._device, self._width = device, width
        self._tensor: torch.Tensor | None = None

    @property
    def slot_of_row(self) -> np.ndarray:
        """[max_rows] int32; -1 for none."""
        return self._slots.of_row

    @property
    def tensor(self) -> torch.Tensor:
        """With a place at least, so that it has an address."""
        size = max(1, self._slots.size)
        old = self._tensor
        if old is None or len(old) < size:
            self._tensor = torch.zeros(size, self._width, dtype=torch.int32, device=self._device)
            if old is not None:
                self._tensor[: len(old)].copy_(old)
        assert self._tensor is not None
        return self._tensor

    def release(self, row: int) -> None:
        self._slots.release(row)


class CountTable(_Table):
    """How often each token was generated, and whether the prompt has it: see `LogitAdjustments.counts`."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)

    def admit(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        slot = self._slots.take(row)
        reset_counts(self.tensor, slot, prompt_ids, output_ids)


class MaskTable(_Table):
    """Which tokens each row may sample; the host's copy is written, and sent when a step needs it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, -(-vocab_size // 32), device)
        self._host = np.empty((0, self._width), dtype=np.int32)
        self._changed: set[int] = set()

    def admit(self, row: int, words: np.ndarray) -> None:
        self._slots.take(row)
        if len(self._host) < self._slots.size:
            grown = np.zeros((self._slots.size, self._width), dtype=np.int32)
            grown[: len(self._host)] = self._host
            self._host = grown
        self.set(row, words)

    def set(self, row: int, words: np.ndarray | int) -> None:
        """words: [width] int32, or one for all."""
        slot = int(self._slots.of_row[row])
        self._host[slot] = words
        self._changed.add(slot)

    def send(self) -> None:
        """Brings the device up to date, by one copy that nobody waits for."""
        if self._changed:
            slots = np.array(sorted(self._changed), dtype=np.int64)
            self._changed.clear()
            self.tensor.index_copy_(0, upload(slots, self._device), upload(self._host[slots], self._device))
