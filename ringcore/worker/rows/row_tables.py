"""Device tables with a slot for each row that needs one: token counts, and token bitmasks.

A table is allocated for its first row and grows by doubling, up to a slot for every row. A kernel may still read the
old table when it grows: torch's allocator reuses the memory in stream order.
"""

from __future__ import annotations

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.logit_adjustments import reset_counts

__all__ = ["BitmaskTable", "CountTable", "mask_tokens", "table_bytes", "token_bitmask"]

ALL_BITS = -1  # a word of a bitmask that allows every token


def table_bytes(max_rows: int, vocab_size: int) -> int:
    """Peak device memory of both tables: while one grows to its full size, the old one is still allocated."""
    size_before = (1 << (max_rows - 1).bit_length()) // 2
    return (max_rows + size_before) * 4 * (vocab_size + -(-vocab_size // 32))


def token_bitmask(vocab_size: int, token_ids: np.ndarray) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32, with the bits of token_ids [n] set."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    np.bitwise_or.at(words, token_ids >> 5, np.uint32(1) << (token_ids & 31).astype(np.uint32))
    return words.view(np.int32)


def mask_tokens(bitmask: np.ndarray, token_ids: np.ndarray) -> None:
    """Clears the bits of token_ids [n] in bitmask [num_words] int32: these tokens cannot be sampled."""
    bitmask &= ~token_bitmask(32 * len(bitmask), token_ids)


class _Slots:
    """The slot of each row. 0 <= slot < size, and no two rows share a slot."""

    def __init__(self, max_rows: int) -> None:
        self.of_row = np.full(max_rows, -1, dtype=np.int32)
        self.size = 0  # slots so far
        self._free: list[int] = []

    def take(self, row: int) -> int:
        assert self.of_row[row] < 0, f"row {row} has a slot"
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
    """[size, width] int32 on the device; new slots are uninitialized."""

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
        """With at least one slot, so that it has an address."""
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
    """Per row, how often each token was generated, and whether the prompt has it: see `LogitAdjustments.counts`."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)

    def admit(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        slot = self._slots.take(row)
        reset_counts(self.tensor, slot, prompt_ids, output_ids)


class BitmaskTable(_Table):
    """A token bitmask per row. Writes go to the host's copy; `send` copies it to the device when a step needs it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, -(-vocab_size // 32), device)
        self._host = np.empty((0, self._width), dtype=np.int32)
        self._changed: set[int] = set()

    def admit(self, row: int, bitmask: np.ndarray) -> None:
        self._slots.take(row)
        if len(self._host) < self._slots.size:
            grown = np.zeros((self._slots.size, self._width), dtype=np.int32)
            grown[: len(self._host)] = self._host
            self._host = grown
        self.set(row, bitmask)

    def set(self, row: int, bitmask: np.ndarray | int) -> None:
        """bitmask: [width] int32, or one word for all."""
        slot = int(self._slots.of_row[row])
        self._host[slot] = bitmask
        self._changed.add(slot)

    def send(self) -> None:
        """Copies the changed bitmasks to the device in one asynchronous H2D copy."""
        if self._changed:
            slots = np.array(sorted(self._changed), dtype=np.int64)
            self._changed.clear()
            self.tensor.index_copy_(0, upload(slots, self._device), upload(self._host[slots], self._device))
