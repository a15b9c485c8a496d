"""Ranks in processes of their own, each with its GPU, and what they do in the tests of tensor parallelism."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ringcore.worker.communicator import NcclCommunicator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Numbers in a message: below, at and above what goes through mailboxes on 2 to 8 ranks, and some that never do.
LENGTHS = (7, 8, 1000, 1024, 4096, 36864, 65536, 131072, 262144, 262152, 2_000_000)


def on_gpus(size: int, folder: Path, work: Callable[..., Any], *args: Any, deadline_s: float = 200) -> list[Any]:
    """`work(tp, device, *args)` on `size` GPUs at once; the results in rank order, which must be plain data."""
    context = multiprocessing.get_context("spawn")
    rendezvous = str(folder / "rendezvous")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_run, args=(pipes[rank][1], work, rank, size, rendezvous, args), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _collect([receiver for receiver, _ in pipes], deadline_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(receivers: list[Connection], deadline_s: float) -> list[Any]:
    """AssertionError with the first rank's traceback, or at the deadline."""
    ends = time.monotonic() + deadline_s
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        missing = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(missing, max(0.0, ends - time.monotonic()))
        assert ready, f"ranks are late; results came from {sorted(results)}"
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            ok, result = receiver.recv()  # type: ignore[union-attr]
            assert ok, f"rank {rank}:\n{result}"
            results[rank] = result
    return [results[rank] for rank in range(len(receivers))]


def _run(sender: Connection, work: Callable[..., Any], rank: int, size: int, rendezvous: str, args: Any) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as an executor's workers have it
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        tp = NcclCommunicator(rank, size, rendezvous, device)
        result = work(tp, device, *args)
        torch.cuda.synchronize()
        sender.send((True, result))
        tp.close()
    except BaseException:
        sender.send((False, traceback.format_exc()))


def numbers(seed: int, rank: int, length: int, dtype: torch.dtype, device: torch.device, whole: bool) -> torch.Tensor:
    """The same for a rank wherever it is asked for, so that any rank knows the sum."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if whole:
        return torch.randint(-20, 21, (1, length), generator=generator).to(device, dtype)
    return torch.randn(1, length, generator=generator).to(device, dtype)


def check_sums(tp: NcclCommunicator, device: torch.device) -> tuple[bool, str]:
    """Every length and dtype -> (whether there is peer memory, a digest of all bits that came out)."""
    digest = hashlib.sha256()
    for seed, (length, dtype) in enumerate((length, dtype) for length in LENGTHS for dtype in DTYPES):
        for whole in (True, False):
            parts = [numbers(seed, rank, length, dtype, device, whole) for rank in range(tp.size)]
            residual = numbers(seed, 99, length, dtype, device, whole)
            exact = torch.stack([part.double() for part in parts]).sum(0)
            total = tp.all_reduce(parts[tp.rank].clone())
            with_residual = residual.clone()
            tp.all_reduce_add(parts[tp.rank].clone(), with_residual)
            _assert_near(total, exact, whole, tp.size)
            _assert_near(with_residual, exact + residual.double(), whole, tp.size)
            side_by_side = tp.all_gather_last_dim(parts[tp.rank].view(1, length))
            assert torch.equal(side_by_side, torch.cat(parts, dim=-1)), (length, dtype)
            for tensor in (total, with_residual, side_by_side):
                digest.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
    aside = [numbers(5, rank, 260, torch.bfloat16, device, True)[:, 4:] for rank in range(tp.size)]  # 8 bytes off
    assert torch.equal(tp.all_reduce(aside[tp.rank]).int(), torch.stack([one.int() for one in aside]).sum(0))
    rows = [numbers(7, rank, 3 * 64, torch.bfloat16, device, False).view(3, 64) for rank in range(tp.size)]
    assert torch.equal(tp.all_gather_last_dim(rows[tp.rank]), torch.cat(rows, dim=-1))
    assert torch.equal(tp.all_gather_last_dim(rows[tp.rank][:, :63]), torch.cat([row[:, :63] for row in rows], dim=-1))
    return tp.has_peer_memory, digest.hexdigest()


def _assert_near(ours: torch.Tensor, exact: torch.Tensor, whole: bool, num_ranks: int) -> None:
    """NCCL rounds after every rank, and once more with the residual: so many roundings of the largest part sum."""
    if whole:
        assert torch.equal(ours.double(), exact), (ours.shape, ours.dtype)
    else:
        unit = torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours.double(), exact, atol=8 * num_ranks * unit, rtol=unit)


def hammer(tp: NcclCommunicator, device: torch.device, num_calls: int) -> int:
    """Calls of changing size, one behind the other, while ranks stop now and then -> how many numbers were wrong."""
    pauses = random.Random(tp.rank)
    lengths = (8, 4096, 1024, 65536, 64, 16384, 300_000)
    index = torch.arange(max(lengths), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(num_calls):
        length = lengths[call * 3 % len(lengths)]
        parts = [((index[:length] * (rank + 3) + call) % 17 - 8).bfloat16()[None] for rank in range(tp.size)]
        total = torch.stack([part.int() for part in parts]).sum(0)
        if pauses.random() < 0.2:
            torch.cuda._sleep(int(pauses.random() * 300_000))
        if call % 4 == 3 and length < 300_000:
            wrong += (tp.all_gather_last_dim(parts[tp.rank]) != torch.cat(parts, dim=-1)).sum()
        elif call % 2:
            residual = torch.full_like(parts[0], 100)
            tp.all_reduce_add(parts[tp.rank], residual)
            wrong += (residual.int() != total + 100).sum()
        else:
            wrong += (tp.all_reduce(parts[tp.rank]).int() != total).sum()
        if pauses.random() < 0.05:
            time.sleep(pauses.random() * 0.002)
    return int(wrong)


def check_graph(tp: NcclCommunicator, device: torch.device, length: int, num_replays: int) -> int:
    """A graph of some layers' sums and a gather, replayed with eager calls between -> how many numbers were wrong.

    Its calls are odd in number, so replays begin with one mailbox and with the other in turn.
    """
    part = torch.zeros(1, length, dtype=torch.bfloat16, device=device)
    residual = torch.zeros_like(part)

    def layers() -> torch.Tensor:
        for _ in range(10):
            tp.all_reduce_add(part.clone(), residual)
        return tp.all_gather_last_dim(part)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = layers()
    index, wrong = torch.arange(length, device=device), torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(num_replays):
        parts = [((index * (rank + 3) + replay) % 5 - 2).bfloat16()[None] for rank in range(tp.size)]
        part.copy_(parts[tp.rank])
        residual.fill_(3)
        graph.replay()
        total = torch.stack([one.int() for one in parts]).sum(0)
        wrong += (residual.int() != 3 + 10 * total).sum() + (gathered != torch.cat(parts, dim=-1)).sum()
        if replay % 3 == 0:
            wrong += (tp.all_reduce(parts[tp.rank]).int() != total).sum()
    return int(wrong)
