"""The mode by which operations on meta are followed."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperationMode"]


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """torch wraps `__torch_dispatch__` for the case that torch.compile meets it, which costs as much as an operation on
    meta. Here nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
