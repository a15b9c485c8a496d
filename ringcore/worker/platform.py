"""The seam between a worker and the kind of device it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ringcore.model_executor.parallel import TensorParallel

__all__ = ["Platform"]


class Platform(ABC):
    """One device, as the worker uses it: its number formats, its memory, its order of attention backends."""

    device: torch.device
    attention_backends: ClassVar[Sequence[str]]  # for attention_backend="auto", the best first
    default_memory_share: ClassVar[float]  # for `memory_budget_bytes`, where the user gave no gpu_memory_utilization
    attention_gathers: ClassVar[bool]  # whether its backends copy pages together

    @classmethod
    @abstractmethod
    def is_present(cls) -> bool:
        """Whether this host has such a device."""

    @abstractmethod
    def connect(self, rank: int, size: int, rendezvous: str) -> TensorParallel:
        """Meets the other ranks through the file `rendezvous`. Raises RuntimeError where one is absent."""

    @abstractmethod
    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The dtype to compute in: `asked`, or for "auto" the checkpoint's where the device is fast at it."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """What this device has, or this process's limit if that is lower."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """What can be allocated now without taking it from anybody."""

    @abstractmethod
    def memory_budget_bytes(self, share: float, num_ranks: int) -> int:
        """What this rank, one of `num_ranks` of the host, may still take, where it shall have `share` of the device."""

    @abstractmethod
    def allocate_pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a layer's pages, zero-filled: what a page holds before its first token must be finite."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has done all it was given."""
