"""The mode by which operations on meta are followed, and what a pass on meta is not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperationMode", "no_checked_values"]


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """torch wraps `__torch_dispatch__` for the case that torch.compile meets it, which costs as much as an operation on
    meta. Here nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def no_checked_values() -> Iterator[None]:
    """Within it torch's distributions do not check the values of what they are given: on meta there are none. Gemma 3n
    takes a quantile of a normal distribution in each MLP."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
