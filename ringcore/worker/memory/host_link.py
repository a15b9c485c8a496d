"""The seam between a device's memory and the host's: copies, and what makes them fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

__all__ = ["HostLink", "LocalLink"]


class HostLink(ABC):
    """How a device's memory and the host's reach each other. Both ends of a copy are uint8, of one length."""

    wants_registered: ClassVar[bool]  # whether host memory has to be made known before copies are fast

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Makes host memory known; a copy must not go beyond it. Raises `CapacityError` or RuntimeError."""

    @abstractmethod
    def unregister(self, memory: torch.Tensor) -> None:
        """Undoes one `register`."""

    @abstractmethod
    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        """Begins a copy, after those that were given before; -> what `wait` takes."""

    @abstractmethod
    def wait(self, copied: Any) -> None:
        """Returns when that copy has ended, and all before it."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when all copies have ended."""


class LocalLink(HostLink):
    """The device is the host: a copy has ended when it returns."""

    wants_registered: ClassVar[bool] = False

    def register(self, memory: torch.Tensor) -> None:
        """Nobody has to know."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Nobody knew."""

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def wait(self, copied: Any) -> None:
        """It has ended."""

    def finish(self) -> None:
        """They have ended."""
