"""The seam between a worker and the kind of device it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

__all__ = ["Platform"]


class Platform(ABC):
    """One device, as the worker uses it: its number formats, its memory, its order of attention backends."""

    device: torch.device
    attention_backends: ClassVar[Sequence[str]]  # for attention_backend="auto", the best first
    default_memory_share: ClassVar[float]  # of `free_memory_bytes`, where the user gave no gpu_memory_utilization

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
    def allocate_pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a layer's pages, zero-filled: what a page holds before its first token must be finite."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has done all it was given."""
