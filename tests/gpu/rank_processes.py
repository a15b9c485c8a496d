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

from ringcore.distributed.communicator import NcclCommunicator, PeerCollectives
from ringcore.distributed.rendezvous import Rendezvous

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = (7, 8, 1000, 1024, 4096, 36864, 65536, 131072, 262144, 262152)  # numbers in a message


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
        tp = NcclCommunicator(rank, size, Rendezvous(rendezvous, rank, size), device)
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


def lengths_at_the_limit(size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Numbers in the longest message that goes through peer buffers, and in the shortest above that could."""
    longest = PeerCollectives.max_reduced_bytes(size)
    return longest // dtype.itemsize, (longest + 16) // dtype.itemsize


def check_sums(tp: NcclCommunicator, device: torch.device) -> tuple[bool, str]:
    """Every length and dtype -> (whether there is peer memory, a digest of all bits that came out)."""
    digest = hashlib.sha256()
    cases = [(length, dtype) for dtype in DTYPES for length in (*LENGTHS, *lengths_at_the_limit(tp.size, dtype))]
    for seed, (length, dtype) in enumerate(cases):
        for whole in (True, False):
            parts = [numbers(seed, rank, length, dtype, device, whole) for rank in range(tp.size)]
            residual = numbers(seed, 99, length, dtype, device, whole)
            exact = torch.stack([part.double() for part in parts]).sum(0)
            total = tp.all_reduce(parts[tp.rank].clone())
            with_residual = residual.clone()
            tp.all_reduce_add(parts[tp.rank].clone(), with_residual)
            stream = residual.to(torch.float32, copy=True)
            tp.all_reduce_add(parts[tp.rank].clone(), stream)
            assert (total.dtype, with_residual.dtype, stream.dtype) == (dtype, dtype, torch.float32)
            _assert_near(total, exact, whole, tp.size, dtype)
            _assert_near(with_residual, exact + residual.double(), whole, tp.size, dtype)
            is_fused = tp.has_peer_memory and length % 8 == 0 and length <= lengths_at_the_limit(tp.size, dtype)[0]
            _assert_near(stream, exact + residual.double(), whole, tp.size, torch.float32 if is_fused else dtype)
            side_by_side = tp.all_gather_last_dim(parts[tp.rank].view(1, length))
            assert torch.equal(side_by_side, torch.cat(parts, dim=-1)), (length, dtype)
            for tensor in (total, with_residual, stream, side_by_side):
                digest.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
    unaligned = [numbers(5, rank, 260, torch.bfloat16, device, True)[:, 4:] for rank in range(tp.size)]  # 8 bytes off
    assert torch.equal(tp.all_reduce(unaligned[tp.rank]).int(), torch.stack([one.int() for one in unaligned]).sum(0))
    rows = [numbers(7, rank, 3 * 64, torch.bfloat16, device, False).view(3, 64) for rank in range(tp.size)]
    assert torch.equal(tp.all_gather_last_dim(rows[tp.rank]), torch.cat(rows, dim=-1))
    assert torch.equal(tp.all_gather_last_dim(rows[tp.rank][:, :63]), torch.cat([row[:, :63] for row in rows], dim=-1))
    return tp.has_peer_memory, digest.hexdigest()


def _assert_near(ours: torch.Tensor, exact: torch.Tensor, whole: bool, num_ranks: int, rounded_to: torch.dtype) -> None:
    """NCCL rounds after every rank, and once more with the residual: so many roundings of the largest part sum."""
    if whole:
        assert torch.equal(ours.double(), exact), (ours.shape, ours.dtype)
    else:
        unit = torch.finfo(rounded_to).eps
        torch.testing.assert_close(ours.double(), exact, atol=8 * num_ranks * unit, rtol=unit)


def hammer(tp: NcclCommunicator, device: torch.device, num_calls: int) -> int:
    """Calls of changing size, one after the other, while ranks stop now and then -> how many numbers were wrong."""
    pauses = random.Random(tp.rank)
    above = lengths_at_the_limit(tp.size, torch.bfloat16)[1]
    lengths = (8, 4096, 1024, 65536, 64, 1 << 20, above)
    index = torch.arange(max(lengths), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(num_calls):
        length = lengths[call * 3 % len(lengths)]
        parts = [((index[:length] * (rank + 3) + call) % 17 - 8).bfloat16()[None] for rank in range(tp.size)]
        total = torch.stack([part.int() for part in parts]).sum(0)
        if pauses.random() < 0.2:
            torch.cuda._sleep(int(pauses.random() * 300_000))
        if call % 4 == 3 and length < above:
            wrong += (tp.all_gather_last_dim(parts[tp.rank]) != torch.cat(parts, dim=-1)).sum()
        elif call % 2:
            residual = torch.full_like(parts[0], 100, dtype=torch.float32 if call % 3 else torch.bfloat16)
            tp.all_reduce_add(parts[tp.rank], residual)
            wrong += (residual.int() != total + 100).sum()
        else:
            wrong += (tp.all_reduce(parts[tp.rank]).int() != total).sum()
        if pauses.random() < 0.05:
            time.sleep(pauses.random() * 0.002)
    return int(wrong)


def check_graph(tp: NcclCommunicator, device: torch.device, length: int | None, num_replays: int) -> int:
    """A graph of some layers' sums and a gather, replayed with eager calls between -> how many numbers were wrong.

    length: None: above what goes through peer buffers. Its calls are odd in number where they all do, so replays begin
    with one buffer and with the other in turn.
    """
    length = length or lengths_at_the_limit(tp.size, torch.bfloat16)[1]
    part = torch.zeros(1, length, dtype=torch.bfloat16, device=device)
    residual, stream = torch.zeros_like(part), torch.zeros_like(part, dtype=torch.float32)

    def layers() -> torch.Tensor:
        for _ in range(5):
            tp.all_reduce_add(part.clone(), residual)
            tp.all_reduce_add(part.clone(), stream)
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
        stream.fill_(3)
        graph.replay()
        total = torch.stack([one.int() for one in parts]).sum(0)
        wrong += sum((one.int() != 3 + 5 * total).sum() for one in (residual, stream))
        wrong += (gathered != torch.cat(parts, dim=-1)).sum()
        if replay % 3 == 0:
            wrong += (tp.all_reduce(parts[tp.rank]).int() != total).sum()
    return int(wrong)


def check_combine(tp: NcclCommunicator, device: torch.device) -> tuple[int, str]:
    """Combines of several sizes, of whole numbers, eagerly and in a graph whose routing changes; a broadcast -> (how
    many numbers were wrong, a digest of all bits that came out)."""
    tp.begin_combine()
    wrong, digest = 0, hashlib.sha256()
    for seed, (num_tokens, hidden) in enumerate(((tp.size, 8), (61, 2048), (512, 4096), (5000, 1032))):
        for dtype in (torch.bfloat16, torch.float32):
            parts = [numbers(seed, rank, num_tokens * hidden, torch.float32, device, True) for rank in range(tp.size)]
            parts = [part.view(num_tokens, hidden) for part in parts]
            ranks_of = torch.zeros(num_tokens, dtype=torch.int32, device=device)
            out, rows = (torch.zeros(num_tokens, hidden, dtype=one, device=device) for one in (dtype, torch.float32))

            def layer(part=parts[tp.rank], ranks_of=ranks_of, out=out, rows=rows, dtype=dtype):
                tp.combine(part, ranks_of, out, dtype, adds=False)
                rows.fill_(7)
                tp.combine(part, ranks_of, rows, dtype, adds=True)

            layer()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer()
            for number in range(5):
                token = torch.arange(num_tokens, device=device)
                ranks_of.copy_((token * 5 + number) % (1 << tp.size))
                (layer if number % 2 else graph.replay)()
                here = [((ranks_of >> rank) & 1)[:, None] for rank in range(tp.size)]
                total = torch.stack([part * bit for part, bit in zip(parts, here, strict=True)]).sum(0)
                wrong += int((out.float() != total).sum() + (rows != total + 7).sum())
                for tensor in (out, rows):
                    digest.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
    sent = torch.arange(1 << 20, device=device).to(torch.uint8)
    received = sent.clone() if tp.rank == tp.size - 1 else torch.zeros_like(sent)
    tp.broadcast(received, tp.size - 1)
    return wrong + int((received != sent).sum()), digest.hexdigest()
