"""The mode by which operations on meta are followed, and what a pass on meta is not asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperationMode", "no_checked_values"]


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """torch wraps `__torch_dispatch__` for the case that torch.compile meets it, which costs as much as an operation on
    meta. Here nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Checks:
    """Whether torch's distributions check values by default, which is one setting of the process."""

    def __init__(self) -> None:
        self._lock, self._num_without, self._before = threading.Lock(), 0, True

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._num_without:
                self._before = Distribution._validate_args
                Distribution.set_default_validate_args(False)
            self._num_without += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_without -= 1
                if not self._num_without:
                    Distribution.set_default_validate_args(self._before)


_checks = _Checks()


def no_checked_values() -> AbstractContextManager[None]:
    """Within it torch's distributions do not check the values of what they are given: on meta there are none. Gemma 3n
    takes a quantile of a normal distribution in each MLP."""
    return _checks.off()
