"""Reads files into the page cache before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["begin_reading_ahead"]

# At most what the kernel reads for one advice, which is the device's largest request or its readahead window
# (posix_fadvise of a whole file reads no more than that either).
_CHUNK_BYTES = 512 << 10


def begin_reading_ahead(paths: Sequence[str], free_bytes: int) -> threading.Thread | None:
    """Has the kernel read these files, in their order, in a daemon thread; what is cached already costs microseconds a
    megabyte. An optimization only: nothing is read that does not fit free_bytes as a whole, and errors are ignored.
    """
    try:
        sizes = [os.stat(path).st_size for path in paths]
    except OSError:
        return None
    if not 0 < sum(sizes) <= free_bytes:
        return None
    thread = threading.Thread(target=_read_ahead, args=(paths, sizes), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: Sequence[str], sizes: Sequence[int]) -> None:
    for path, size in zip(paths, sizes, strict=True):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            for start in range(0, size, _CHUNK_BYTES):  # each call returns once the requests are queued
                os.posix_fadvise(file.fileno(), start, _CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
