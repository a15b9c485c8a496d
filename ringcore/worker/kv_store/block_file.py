"""One block in one file: its bytes after a header with their length and a digest of its name and of them.

    magic and version   8 bytes
    length              8 bytes, little-endian
    digest             32 bytes: BLAKE2b of the name and the bytes

A file that is short, long, changed, or under another's name is no block. It is written beside its place and renamed, so
a reader sees a whole file or none; after a crash of the host it may see another one, which the digest tells.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Literal

__all__ = ["HEADER_BYTES", "Found", "read_block", "write_block"]

Found = Literal["whole", "missing", "broken"]

_MAGIC = b"rckv\x00\x00\x00\x01"
HEADER_BYTES = len(_MAGIC) + 8 + 32


def write_block(path: Path, temporary: Path, name: bytes, contents: memoryview) -> None:
    """Raises OSError; then there is no file, or the one before."""
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(_header(name, contents))
            for part in (left, contents):
                while part:
                    part = part[os.write(file, part) :]
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_block(path: Path, name: bytes, out: memoryview) -> Found:
    """What the file is: "whole", and `out` has the block's bytes now; "broken", or "missing", and `out` has any bytes.
    A whole file counts as used just now."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "broken"
    try:
        if not _read(file, name, out):
            return "broken"
        with suppress(OSError):  # a file of another user
            os.utime(file)
    except OSError:
        return "broken"
    finally:
        os.close(file)
    return "whole"


def _read(file: int, name: bytes, out: memoryview) -> bool:
    if os.fstat(file).st_size != HEADER_BYTES + len(out):
        return False
    header, at = os.read(file, HEADER_BYTES), 0
    while at < len(out):
        count = os.preadv(file, [out[at:]], HEADER_BYTES + at)
        if not count:
            return False
        at += count
    return header == _header(name, out)


def _header(name: bytes, contents: memoryview) -> bytes:
    digest = blake2b(name, digest_size=32)
    digest.update(contents)
    return _MAGIC + struct.pack("<q", len(contents)) + digest.digest()
