"""Tensor-parallel communicators between worker processes: gloo for CPUs, NCCL for GPUs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from ringcore.distributed.combine import PeerCombine, saves_bytes
from ringcore.distributed.parallel import TensorParallel
from ringcore.distributed.peer_memory import CudaPeerDriver, PeerMemory
from ringcore.distributed.rendezvous import Rendezvous

__all__ = ["GlooCommunicator", "NcclCommunicator"]

_ALIGNMENT = 16  # bytes, of the kernels' tensors


class GlooCommunicator(TensorParallel):
    """Collectives over the loopback interface, or between hosts, in a private process group: torch's global one stays
    the user's."""

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, name: str = "ranks") -> None:
        """rank: in this group, of `size`. Returns when all are connected, or raises RuntimeError. name: of the group,
        among those of the rendezvous."""
        self.rank = rank
        self.size = size
        self._group: Any = ProcessGroupGloo(rendezvous.store(name), rank, size, rendezvous.gloo_options())

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        assert self._group is not None, "closed"
        _broadcast(self._group, tensor, source)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 whatever the dtype: 16-bit sums would be rounded at every rank."""
        assert self._group is not None, "closed"
        exact = tensor.to(torch.float32)  # the tensor itself if it is float32
        contiguous = exact.contiguous()
        self._group.allreduce([contiguous]).wait()
        return contiguous.to(tensor.dtype)

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self._group is not None, "closed"
        return _all_gather_last_dim(self._group, self.size, tensor.contiguous(), out)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


class NcclCommunicator(TensorParallel):
    """Collectives between GPUs, on the current stream, in a private process group as gloo's.

    Messages up to some MiB take the one-shot kernels over peer memory, where the GPUs have peer access: NCCL takes 12
    to 19 us however small the message is (two H200). Only shape and dtype decide, so all ranks decide alike.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        device: torch.device,
        name: str = "ranks",
        one_host: bool = True,
    ) -> None:
        """As `GlooCommunicator`. device: this rank's GPU. one_host: whether all ranks of the group share a host; then
        their GPUs follow each other in their order."""
        from torch.distributed import ProcessGroupNCCL  # a CPU build has none

        self.rank = rank
        self.size = size
        options = ProcessGroupNCCL.Options()
        options._timeout = rendezvous.timeout
        store = self._store = rendezvous.store(name)
        self._device = device
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._peers: PeerCollectives | None = None
        self._combine: PeerCombine | None = None
        self.all_reduce(torch.zeros(1, device=device))  # connects now instead of in the first request
        if one_host:  # no GPU maps the memory of one on another host
            self._peers = PeerCollectives.connect(rank, size, store, device)
        torch.cuda.synchronize(device)

    @property
    def has_peer_memory(self) -> bool:
        """Whether small messages bypass NCCL."""
        return self._peers is not None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place if the tensor is contiguous; in its own dtype, summed in the same order on every rank."""
        assert self._group is not None, "closed"
        contiguous = tensor.contiguous()
        if self._peers is not None and self._peers.can_reduce(contiguous):
            return self._peers.all_reduce(contiguous)
        self._group.allreduce([contiguous]).wait()
        return contiguous

    def all_reduce_add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """A small sum is rounded once, after the residual add; a large one also before it."""
        assert self._group is not None, "closed"
        contiguous = partial.contiguous()
        if self._peers is not None and self._peers.can_add(contiguous, residual):
            self._peers.all_reduce(contiguous, residual)
        else:
            super().all_reduce_add(contiguous, residual)

    def begin_combine(self) -> None:
        """With peer memory; without, tokens are summed by an all-reduce."""
        if self._peers is not None:
            self._combine = PeerCombine.connect(self.rank, self.size, self._store, self._device)

    def combines(self, num_tokens: int, hidden_size: int, k: int, dtype: torch.dtype) -> bool:
        if self._combine is None or not self._combine.fits(hidden_size):
            return False
        is_one_shot = num_tokens * hidden_size * 4 <= PeerCollectives.max_reduced_bytes(self.size)
        return saves_bytes(num_tokens, hidden_size, k, self.size, dtype.itemsize, is_one_shot=is_one_shot)

    def combine(
        self, partial: torch.Tensor, ranks_of: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, adds: bool
    ) -> None:
        assert self._combine is not None, "it does not combine"
        self._combine(partial, ranks_of, out, dtype, adds)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        assert self._group is not None, "closed"
        _broadcast(self._group, tensor, source)

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self._group is not None, "closed"
        contiguous = tensor.contiguous()
        if self._peers is not None and self._peers.can_gather(contiguous):
            return self._peers.all_gather_last_dim(contiguous, out)
        return _all_gather_last_dim(self._group, self.size, contiguous, out)

    def detached(self) -> TensorParallel:
        peers = None if self._peers is None else self._peers.detached()
        combine = None if self._combine is None else self._combine.detached()
        return self._of(self.rank, self.size, _NullProcessGroup(), peers, combine)

    @classmethod
    def _of(
        cls, rank: int, size: int, group: Any, peers: PeerCollectives | None, combine: PeerCombine | None = None
    ) -> NcclCommunicator:
        one = cls.__new__(cls)
        one.rank, one.size, one._group, one._peers, one._combine = rank, size, group, peers, combine
        return one

    def close(self) -> None:
        group, self._group = self._group, None
        by_peers, self._peers, self._combine = (self._peers, self._combine), None, None
        for one in by_peers:
            if one is not None:
                one.close()
        if group is not None:
            group.shutdown()


def _broadcast(group: Any, tensor: torch.Tensor, source: int) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    group.broadcast([tensor], options).wait()


def _all_gather_last_dim(group: Any, size: int, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The gathered shards of a single row are contiguous already; several rows are copied."""
    first, *others = tensor.shape
    if out is not None and tensor.numel() == tensor.shape[-1]:
        group._allgather_base(out.view(size * first, *others), tensor).wait()
        return out
    gathered = tensor.new_empty(size * first, *others)
    group._allgather_base(gathered, tensor).wait()
    rows = gathered.view(size, *tensor.shape).movedim(0, -2)
    if out is None:
        return rows.reshape(*tensor.shape[:-1], size * tensor.shape[-1])
    out.view(rows.shape).copy_(rows)
    return out


class _NullProcessGroup:
    """A process group without communication, for a detached rank."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _NullProcessGroup:
        return self

    def _allgather_base(self, gathered: torch.Tensor, shard: torch.Tensor) -> _NullProcessGroup:
        gathered.zero_()
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _NullProcessGroup:
        return self

    def wait(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class PeerCollectives:
    """One-shot collectives for small messages, through `PeerMemory`."""

    # One-shot all-reduce: every rank sends its whole message to every other one. A two-shot one (reduce-scatter, then
    # all-gather) would send 2 / size of that: as much with two ranks, and less with more.
    _SENT_BYTES = 8 << 20  # by one rank for an all-reduce, to all others
    _GATHERED_BYTES = 2 << 20  # from each rank; a one-shot all-gather sends no byte twice

    def __init__(self, memory: PeerMemory, rank: int, device: torch.device) -> None:
        from ringcore.kernels.collectives import all_reduce  # needs Triton, as all kernels
        from ringcore.kernels.collectives.peer_buffers import PeerBuffers
        from ringcore.kernels.launch.dependent_launch import supports_pdl

        self._memory = memory
        self._kernels = all_reduce
        size = len(memory.addresses)
        self._buffers = PeerBuffers.at(memory.addresses, rank, self.capacity_bytes(size), device)
        self._max_reduced_bytes = self.max_reduced_bytes(size)
        self._pdl = supports_pdl(device)

    @classmethod
    def connect(cls, rank: int, size: int, store: PrefixStore, device: torch.device) -> PeerCollectives | None:
        """None, on every rank, if the GPUs lack peer access to each other, or are too many."""
        from ringcore.kernels.collectives.peer_buffers import MAX_RANKS, SENTINEL_BYTE, PeerBuffers

        if size > MAX_RANKS:
            return None
        num_bytes = PeerBuffers.num_bytes(size, cls.capacity_bytes(size))
        memory = PeerMemory.connect(
            rank, size, store, num_bytes, SENTINEL_BYTE, CudaPeerDriver(device, device.index - rank)
        )
        return None if memory is None else cls(memory, rank, device)

    @classmethod
    def max_reduced_bytes(cls, size: int) -> int:
        """Of an all-reduce message."""
        return cls._SENT_BYTES // (size - 1) // _ALIGNMENT * _ALIGNMENT

    @classmethod
    def capacity_bytes(cls, size: int) -> int:
        """Of a receive buffer."""
        return max(cls.max_reduced_bytes(size), cls._GATHERED_BYTES)

    def detached(self) -> PeerCollectives:
        """The same with kernels that are compiled or intercepted, not launched."""
        detached = copy.copy(self)
        detached._buffers = replace(self._buffers, launches=False)
        return detached

    def can_reduce(self, tensor: torch.Tensor) -> bool:
        return self._buffers.fits(tensor) and tensor.nbytes <= self._max_reduced_bytes

    def can_add(self, partial: torch.Tensor, residual: torch.Tensor) -> bool:
        """Whether all-reduce and residual add can be one kernel."""
        return (
            self.can_reduce(partial) and residual.is_contiguous() and residual.dtype in (partial.dtype, torch.float32)
        )

    def all_reduce(self, partial: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`residual` with the sum added, where given; else the sum, in `partial` if it is aligned."""
        partial = _aligned(partial)
        if residual is not None and residual.data_ptr() % _ALIGNMENT:
            return residual.add_(self.all_reduce(partial))
        out = partial if residual is None else residual
        return self._kernels.all_reduce(partial, self._buffers, out=out, residual=residual, pdl=self._pdl)

    def can_gather(self, tensor: torch.Tensor) -> bool:
        return self._buffers.fits_rows(tensor) and tensor.nbytes <= self._GATHERED_BYTES

    def all_gather_last_dim(self, shard: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.all_gather_last_dim(_aligned(shard), self._buffers, out=out, pdl=self._pdl)

    def close(self) -> None:
        self._memory.close()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it is not aligned to 16 bytes: a slice of rows of an odd size."""
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
