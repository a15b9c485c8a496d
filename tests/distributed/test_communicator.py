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

from ringcore.distributed.communicator import GlooCommunicator
from ringcore.distributed.parallel import SingleRank
from ringcore.distributed.rendezvous import Rendezvous


def on_two_ranks(folder: Path, work: Callable[[GlooCommunicator], Any]) -> list[Any]:
    results: list[Any] = [None, None]
    met = threading.Barrier(2)

    def serve(rank: int) -> None:
        try:
            group = GlooCommunicator(rank, 2, Rendezvous(str(folder / "rendezvous"), rank, 2, timedelta(seconds=20)))
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


@pytest.mark.parametrize("has_place", [False, True])
@pytest.mark.parametrize("shape", [(3,), (1, 5), (2, 3, 4)])
def test_all_gather_of_any_shape(tmp_path: Path, shape: tuple[int, ...], has_place: bool) -> None:
    parts = [torch.arange(24.0)[: torch.Size(shape).numel()].view(shape) * (rank + 1) for rank in range(2)]
    places = [torch.full((*shape[:-1], 2 * shape[-1]), -1.0) for _ in range(2)]

    def work(group: GlooCommunicator) -> torch.Tensor:
        place = places[group.rank] if has_place else None
        gathered = group.all_gather_last_dim(parts[group.rank], place)
        assert place is None or gathered is place
        return gathered

    for result in on_two_ranks(tmp_path, work):
        assert torch.equal(result, torch.cat(parts, dim=-1))


def test_an_absent_rank_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        GlooCommunicator(0, 2, Rendezvous(str(tmp_path / "rendezvous"), 0, 2, timedelta(milliseconds=300)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_added_to_the_residual_in_place(tmp_path: Path, dtype: torch.dtype) -> None:
    def work(group: GlooCommunicator) -> torch.Tensor:
        residual = torch.full((2, 3), 100.0, dtype=dtype)
        group.all_reduce_add(torch.arange(6).to(dtype).view(2, 3) * (10 if group.rank else 1), residual)
        return residual

    for residual in on_two_ranks(tmp_path, work):
        assert residual.dtype == dtype
        assert torch.equal(residual, (torch.arange(6).view(2, 3) * 11 + 100).to(dtype))


def test_a_rank_alone_adds_its_own_part() -> None:
    residual, partial = torch.full((2, 3), 2.0), torch.arange(6.0).view(2, 3)
    SingleRank().all_reduce_add(partial, residual)
    assert torch.equal(residual, torch.arange(6.0).view(2, 3) + 2)


def test_a_broadcast_leaves_every_bit(tmp_path: Path) -> None:
    def work(group: GlooCommunicator) -> torch.Tensor:
        tensor = torch.arange(256).to(torch.uint8) if group.rank == 1 else torch.zeros(256, dtype=torch.uint8)
        group.broadcast(tensor, 1)
        return tensor

    for tensor in on_two_ranks(tmp_path, work):
        assert tensor.tolist() == list(range(256))
