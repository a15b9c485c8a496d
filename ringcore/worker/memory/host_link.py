"""The interface of copies between device and host memory, and of pinning host memory for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

__all__ = ["HostLink", "LocalLink"]


class HostLink(ABC):
    """Asynchronous copies between device and host memory, in order. Both ends of a copy are uint8 of equal length."""

    wants_registered: ClassVar[bool]  # whether host memory has to be pinned for fast copies

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Pins host memory; a copy must lie within one registered range. Raises `CapacityError` or RuntimeError."""

    @abstractmethod
    def unregister(self, memory: torch.Tensor) -> None:
        """Undoes one `register`."""

    @abstractmethod
    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        """Starts a copy after all earlier ones; -> a token for `wait`."""

    @abstractmethod
    def wait(self, copied: Any) -> None:
        """Waits for a copy, and all before it."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for all copies."""


class LocalLink(HostLink):
    """The device is the host: copies are synchronous."""

    wants_registered: ClassVar[bool] = False

    def register(self, memory: torch.Tensor) -> None:
        """A no-op."""

    def unregister(self, memory: torch.Tensor) -> None:
        """A no-op."""

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def wait(self, copied: Any) -> None:
        """A no-op: copies are synchronous."""

    def finish(self) -> None:
        """A no-op: copies are synchronous."""
