"""Reads the lines of an input, local or by fsspec, plain, gzip or zstd, in bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO, Any, cast

from ringcore.batch.job import InputFacts
from ringcore.errors import ConfigError

__all__ = ["HashedChunks", "ScanStopped", "check_absent", "is_remote", "open_input", "split_lines", "upload"]

_CHUNK_BYTES = 1 << 20
_ZSTD_BYTES = 1 << 10  # decompressed at once: even of a file made to deceive that is at most 32 MiB
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def is_remote(path: str) -> bool:
    """Whether it is a URL, as of "s3://bucket/key"."""
    return "://" in path


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """The input as bytes, decompressed if its first bytes say so. Raises `ConfigError`, also for what fails within."""
    try:
        with _open(path) as raw:
            buffered = io.BufferedReader(cast("io.RawIOBase", raw), _CHUNK_BYTES)
            magic = buffered.peek(len(_ZSTD))[: len(_ZSTD)]
            if magic.startswith(_GZIP):
                with gzip.GzipFile(fileobj=buffered) as unzipped:
                    yield cast("IO[bytes]", unzipped)
            elif magic == _ZSTD:
                yield cast("IO[bytes]", _ZstdFrames(path, cast("IO[bytes]", buffered)))
            else:
                yield cast("IO[bytes]", buffered)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # zstandard's, and those of fsspec's file systems, have no common base
        if isinstance(error, ConfigError) or not type(error).__module__.startswith(_LIBRARIES):
            raise
        raise _unreadable(path, error) from error


_LIBRARIES = ("zstd", "zstandard", "backend_c", "fsspec", "s3fs", "gcsfs", "adlfs", "botocore", "aiohttp")


def _unreadable(path: str, error: Exception) -> ConfigError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return ConfigError(f"input={path!r}: cannot be read: {text}", option="input", value=path)


def _open(path: str) -> IO[bytes]:
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    return cast("IO[bytes]", _fsspec(path, "input").open(path, "rb").open())


class _ZstdFrames:
    """The content of zstd frames, one after the other. Unlike zstandard's own reader it raises `EOFError` for a last
    frame that is cut off."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        if find_spec("zstandard") is None:
            raise ConfigError(f"input={path!r}: zstd needs pip install 'ringcore[batch]'", option="input", value=path)
        import zstandard

        self._raw, self._new_frame = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._is_within = False  # a frame has begun, and has not ended

    def read(self, size: int) -> bytes:
        """At least `size` bytes, but for the last ones."""
        parts: list[bytes] = []
        num_bytes = 0
        while num_bytes < size and (packed := self._raw.read(_ZSTD_BYTES)):
            while packed:
                parts.append(self._frame.decompress(packed))
                num_bytes += len(parts[-1])
                self._is_within, packed = not self._frame.eof, self._frame.unused_data
                if self._frame.eof:
                    self._frame = self._new_frame()
        if self._is_within and not num_bytes:
            raise EOFError("the last zstd frame is cut off")
        return b"".join(parts)


def upload(file: str, url: str) -> None:
    """Raises `ConfigError`."""
    filesystem, path = _fsspec(url, "output").core.url_to_fs(url)
    try:
        filesystem.put_file(os.path.abspath(file), path)
    except Exception as error:  # of any file system that fsspec knows
        raise ConfigError(
            f"output={url!r}: the results are complete in {file!r}, and cannot be copied: {type(error).__name__}: "
            f"{error}; copy the file, or run again with --resume",
            option="output",
            value=url,
        ) from error


def check_absent(url: str) -> None:
    """Raises `ConfigError` if there is something."""
    filesystem, path = _fsspec(url, "output").core.url_to_fs(url)
    if filesystem.exists(path):
        raise ConfigError(f"output={url!r}: it exists; give another output", option="output", value=url)


def _fsspec(url: str, option: str) -> Any:
    if find_spec("fsspec") is None:
        raise ConfigError(f"{option}={url!r}: a URL needs pip install 'ringcore[batch]'", option=option, value=url)
    import fsspec

    return fsspec


class ScanStopped(Exception):
    """The caller asked to stop; never leaves the package."""


class HashedChunks:
    """The chunks of a stream, and once they have been read their identity. Raises `ScanStopped`."""

    def __init__(self, stream: IO[bytes], is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._stream, self._is_stopped = stream, is_stopped
        self._sha256, self._num_bytes = hashlib.sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._stream.read(_CHUNK_BYTES):
            if self._is_stopped():
                raise ScanStopped
            self._sha256.update(chunk)
            self._num_bytes += len(chunk)
            yield chunk

    def facts(self) -> InputFacts:
        return InputFacts(self._sha256.hexdigest(), self._num_bytes)


def split_lines(chunks: Iterator[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """The lines without their line feed; None in place of one longer than `max_bytes`, which is not kept."""
    begun, is_long = bytearray(), False
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        is_long = is_long or len(begun) + len(first) > max_bytes
        if not is_long:
            begun += first
        if not others:
            continue
        yield None if is_long else bytes(begun)
        for line in others[:-1]:
            yield None if len(line) > max_bytes else line
        begun, is_long = bytearray(others[-1]), len(others[-1]) > max_bytes
    if begun or is_long:
        yield None if is_long else bytes(begun)
