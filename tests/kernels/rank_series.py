"""A series of collective calls on several ranks at once: in streams of one GPU, or in processes with the interpreter.

One GPU has room for the kernels of all ranks, so their buffers are simply its memory. The interpreter runs one kernel
at a time and waits inside it, so there every rank is a process of its own, and buffers and results are memory that
the processes share at the same addresses.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ringcore.kernels.collectives.all_reduce import all_gather_last_dim, all_reduce
from ringcore.kernels.collectives.peer_buffers import SENTINEL_BYTE, PeerBuffers

CAPACITY = 1 << 16
_DEADLINE_S = 60
_CYCLES_PER_SECOND = 1.5e9


@dataclass
class Call:
    """One collective: what each rank gives, and where each finds the result, which is NaN before."""

    gathers: bool
    shards: list[torch.Tensor]
    residuals: list[torch.Tensor] | None
    outs: list[torch.Tensor]

    def run(self, rank: int, buffers: PeerBuffers, pdl: bool) -> None:
        shard, out = self.shards[rank], self.outs[rank]
        if self.gathers:
            all_gather_last_dim(shard, buffers, out=out, pdl=pdl)
        else:
            residual = None if self.residuals is None else self.residuals[rank]
            all_reduce(shard, buffers, out=out, residual=residual, pdl=pdl)


class Ranks:
    """Ranks that have buffers for each other. Series may follow one another."""

    def __init__(self, size: int, device: torch.device, programs: int, capacity: int = CAPACITY) -> None:
        self.size, self.device = size, device
        num_bytes = PeerBuffers.num_bytes(size, capacity)
        self._memory = [shared(num_bytes, device).fill_(SENTINEL_BYTE) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.buffers = [PeerBuffers.at(addresses, rank, capacity, device, programs) for rank in range(size)]
        for index, buffers in enumerate(self.buffers):
            self.buffers[index] = replace(buffers, calls=self.put(buffers.calls))
        if device.type == "cuda":
            torch.cuda._sleep(1)  # a kernel that is new to the process may not be loaded while others run
            self._streams = [torch.cuda.Stream(device) for _ in range(size)]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that all ranks can reach."""
        return self.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """NaNs that all ranks can reach."""
        return shared(torch.Size(shape).numel() * dtype.itemsize, self.device).view(dtype).view(shape)

    def run(self, calls: Sequence[Call], *, pdl: bool = False, delay_s: float = 0.0) -> None:
        """Every rank makes all calls in order, and waits for up to `delay_s` before some of them."""
        if self.device.type == "cuda":
            self._run_in_streams(calls, pdl, delay_s)
        else:
            in_processes(self.size, lambda rank: self._run_rank(rank, calls, delay_s), _DEADLINE_S)
        for buffers in self.buffers:
            assert buffers.calls.unique().numel() == 1, "programs differ in what they have counted"
        for memory in self._memory:
            assert (memory == SENTINEL_BYTE).all(), "a word was left in a buffer"

    def _run_rank(self, rank: int, calls: Sequence[Call], delay_s: float) -> None:
        pauses = random.Random(rank)
        for call in calls:
            if delay_s and pauses.random() < 0.3:
                time.sleep(pauses.random() * delay_s)
            call.run(rank, self.buffers[rank], False)

    def _run_in_streams(self, calls: Sequence[Call], pdl: bool, delay_s: float) -> None:
        pauses = [random.Random(rank) for rank in range(self.size)]
        torch.cuda.synchronize()
        for number, call in enumerate(calls):
            for rank, stream in enumerate(self._streams):
                with torch.cuda.stream(stream):
                    if delay_s and pauses[rank].random() < 0.3:
                        torch.cuda._sleep(int(pauses[rank].random() * delay_s * _CYCLES_PER_SECOND))
                    call.run(rank, self.buffers[rank], pdl)
            if number % 50 == 49:  # a stream that is full would block the next launch, where no deadline is seen
                self._wait()
        self._wait()

    def capture(self, calls: Sequence[Call], *, pdl: bool) -> list[torch.cuda.CUDAGraph]:
        """A graph a rank. The kernels must have run before."""
        graphs = []
        for rank, stream in enumerate(self._streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for call in calls:
                    call.run(rank, self.buffers[rank], pdl)
            graphs.append(graph)
        return graphs

    def replay(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        for graph, stream in zip(graphs, self._streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        self._wait()

    def _wait(self) -> None:
        """For all streams. At the deadline waiting kernels are released, so that the GPU is free for others."""
        ends = time.monotonic() + _DEADLINE_S
        while not all(stream.query() for stream in self._streams):
            if time.monotonic() > ends:
                self._release()
                raise AssertionError("a rank waited in vain")

    def _release(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            while not all(stream.query() for stream in self._streams):
                for memory in self._memory:
                    memory.zero_()


def shared(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of ones in every bit, which is NaN; children made by fork() have the same memory."""
    if device.type == "cuda":
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).fill_(0xFF)


def in_processes(size: int, work: Callable[[int], None], deadline_s: float) -> None:
    """`work(rank)` in `size` children at once; AssertionError, and all are killed, when one fails or is late."""
    children = [_fork(work, rank) for rank in range(size)]
    codes: dict[int, int] = {}
    ends = time.monotonic() + deadline_s
    try:
        while len(codes) < size and time.monotonic() < ends and not any(codes.values()):
            time.sleep(0.002)
            for rank, pid in enumerate(children):
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
    finally:
        for rank, pid in enumerate(children):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert codes == dict.fromkeys(range(size), 0), f"exit codes by rank, of those that ended in time: {codes}"


def _fork(work: Callable[[int], None], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
