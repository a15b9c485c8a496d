"""Tensor parallelism inside one process: each rank is a thread, the collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ringcore.distributed.parallel import TensorParallel

T = TypeVar("T")


class ThreadRank(TensorParallel):
    combines_all = False  # whether whole experts are combined, and not summed by an all-reduce

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[torch.Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = tensor.clone()
        self._barrier.wait(timeout=30)
        parts = list(self._board)
        self._barrier.wait(timeout=30)  # no rank writes the next round before all have read this one
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def combines(self, num_tokens: int, hidden_size: int, k: int, dtype: torch.dtype) -> bool:
        return self.combines_all

    def combine(
        self, partial: torch.Tensor, ranks_of: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, adds: bool
    ) -> None:
        here = ((ranks_of >> self.rank) & 1).bool()[:, None]
        total = torch.stack(self._exchange(partial.masked_fill(~here, 0))).sum(0).to(dtype)
        out.copy_(out + total if adds else total)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._exchange(tensor)[source])

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), -1, out=out)


def on_all_ranks(size: int, work: Callable[[TensorParallel], T]) -> list[T]:
    """`work(tp)` on every rank at once; the results in rank order. An error on one rank ends the others' waits."""
    barrier = threading.Barrier(size)
    board: list[torch.Tensor | None] = [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception(timeout=60)) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
