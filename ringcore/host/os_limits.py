"""Operating system limits (file descriptors, memory, processes) as errors that name the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringcore.errors import CapacityError, RingcoreError

__all__ = ["os_limit_errors"]


@contextmanager
def os_limit_errors(what: str) -> Iterator[None]:
    """Converts an `OSError` of code that allocates system resources to a `CapacityError` that starts with `what`."""
    try:
        yield
    except RingcoreError:  # some are OSErrors too: a deadline error is a TimeoutError
        raise
    except OSError as error:
        raise CapacityError(
            f"{what}: {error.strerror or error}; raise the limit on open files (ulimit -n), or free memory"
        ) from error
