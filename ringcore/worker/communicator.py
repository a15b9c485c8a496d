"""Tensor parallelism between worker processes of one host: over gloo for CPUs, over NCCL for GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from ringcore.model_executor.parallel import TensorParallel

__all__ = ["GlooCommunicator", "NcclCommunicator"]

# Ranks execute the same steps at the same time, so a collective waits for no more than another rank's share of the
# step; and a rank that died is seen at once by its closed connection. This ends what neither of these ends.
_TIMEOUT = timedelta(seconds=300)


class GlooCommunicator(TensorParallel):
    """Collectives over the loopback interface. A process group of its own: torch's global one stays the user's."""

    def __init__(self, rank: int, size: int, rendezvous: str, timeout: timedelta = _TIMEOUT) -> None:
        """Meets the other ranks through the file `rendezvous`; returns when all are connected, or raises RuntimeError.

        The file is not used afterwards. It must be private: who can write it can join.
        """
        self.rank = rank
        self.size = size
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timeout
        store = FileStore(rendezvous, size)
        store.set_timeout(timeout)
        self._group: Any = ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 whatever the dtype: sums of half formats would be rounded at every rank."""
        assert self._group is not None, "closed"
        exact = tensor.to(torch.float32)  # the tensor itself where it is float32
        contiguous = exact.contiguous()
        self._group.allreduce([contiguous]).wait()
        return contiguous.to(tensor.dtype)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "closed"
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


class NcclCommunicator(TensorParallel):
    """Collectives between GPUs, on the stream that is current. A process group of its own, as gloo's."""

    def __init__(
        self, rank: int, size: int, rendezvous: str, device: torch.device, timeout: timedelta = _TIMEOUT
    ) -> None:
        """As `GlooCommunicator`. `device`: this rank's GPU, another one than any other rank's."""
        from torch.distributed import ProcessGroupNCCL  # a CPU build has none

        self.rank = rank
        self.size = size
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = FileStore(rendezvous, size)
        store.set_timeout(timeout)
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self.all_reduce(torch.zeros(1, device=device))  # connects: now, and not in the first request
        torch.cuda.synchronize(device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place where the tensor is contiguous; in its own dtype, summed in the same order on every rank."""
        assert self._group is not None, "closed"
        contiguous = tensor.contiguous()
        self._group.allreduce([contiguous]).wait()
        return contiguous

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "closed"
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
