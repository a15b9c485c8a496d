"""What the operating system refuses (descriptors, memory, processes), as an error that names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringcore.errors import CapacityError, RingcoreError

__all__ = ["os_limit_errors"]


@contextmanager
def os_limit_errors(what: str) -> Iterator[None]:
    """For what takes resources of the system: an `OSError` in it becomes a `CapacityError` that begins with `what`."""
    try:
        yield
    except RingcoreError:  # some of ours are OSErrors too: a deadline is a TimeoutError
        raise
    except OSError as error:
        raise CapacityError(
            f"{what}: {error.strerror or error}; raise the limit on open files (ulimit -n), or free memory"
        ) from error
