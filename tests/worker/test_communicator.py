"""Two ranks in two threads of this process: each has a process group of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcore.worker.communicator import GlooCommunicator


def on_two_ranks(folder: Path, work: Callable[[GlooCommunicator], Any]) -> list[Any]:
    results: list[Any] = [None, None]
    met = threading.Barrier(2)

    def serve(rank: int) -> None:
        try:
            group = GlooCommunicator(rank, 2, str(folder / "rendezvous"), timedelta(seconds=20))
            met.wait(20)
            shutil.rmtree(folder, ignore_errors=True)  # the file is for meeting only
            results[rank] = work(group)
            met.wait(20)
            group.close()
            group.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_reduce_sums_float32_in_place(tmp_path: Path) -> None:
    def work(group: GlooCommunicator) -> tuple[torch.Tensor, bool]:
        tensor = torch.arange(6.0).view(2, 3) * (10 if group.rank else 1)
        result = group.all_reduce(tensor)
        return result, result.data_ptr() == tensor.data_ptr()

    for result, in_place in on_two_ranks(tmp_path, work):
        assert in_place
        assert torch.equal(result, torch.arange(6.0).view(2, 3) * 11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_reduce_keeps_a_half_formats_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    for result in on_two_ranks(tmp_path, lambda group: group.all_reduce(torch.full((4,), 1.5, dtype=dtype))):
        assert result.dtype == dtype
        assert result.tolist() == [3.0] * 4


def test_all_reduce_of_a_strided_tensor(tmp_path: Path) -> None:
    for result in on_two_ranks(tmp_path, lambda group: group.all_reduce(torch.arange(6.0).view(2, 3).t())):
        assert result.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_all_gather_is_in_rank_order_and_the_same_everywhere(tmp_path: Path) -> None:
    def work(group: GlooCommunicator) -> torch.Tensor:
        return group.all_gather_last_dim(torch.tensor([[1, 2], [3, 4]]) + 10 * group.rank)

    for result in on_two_ranks(tmp_path, work):
        assert result.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]


def test_an_absent_rank_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        GlooCommunicator(0, 2, str(tmp_path / "rendezvous"), timedelta(milliseconds=300))
