"""The files and batches of a service, in a folder that outlives it.

files/ID.json, files/ID.data          a file: what it is, and its content
batches/ID.json                       a batch
batches/ID.results, with .journal     what of it is done, while it runs
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from ringcore.batch.disk import replace_file
from ringcore.errors import ConfigError
from ringcore.openai_api.errors import ApiError
from ringcore.openai_api.served_model import unix_seconds

__all__ = ["Batch", "BatchStore", "Counts", "StoredFile", "window_s"]

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_MAX_PAGE = 10_000
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

T = TypeVar("T", bound="StoredFile | Batch")


class StoredFile(msgspec.Struct, frozen=True):
    """OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True):
    """OpenAI's batch object."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    completion_window: str = "24h"
    status: str = "validating"
    object: str = "batch"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expires_at: int | None = None  # None: of a batch that an older version stored
    expired_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled", "expired")


class BatchStore:
    """Reads and writes what is in the folder; every change is on the disk when a method returns.

    max_bytes: of all uploaded files and results together.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._files, self._batches = Path(folder, "files"), Path(folder, "batches")
        self._max_bytes = max_bytes
        try:
            for one in (self._files, self._batches):
                one.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in self._files.glob("upload-*"):  # of a service that ended meanwhile
                left.unlink()
        except OSError as error:
            raise ConfigError(
                f"batch_dir={folder!r}: cannot be used: {error.strerror}; give another folder",
                option="batch_dir",
                value=folder,
            ) from error

    # -----------------------------------------------------------------------------------------------------------
    # Files.

    def new_upload(self) -> Path:
        """A path for what is being uploaded."""
        return self._files / f"upload-{uuid4().hex}"

    def free_bytes(self) -> int:
        return self._max_bytes - sum(path.stat().st_size for path in self._files.glob("*.data"))

    def add_file(self, content: Path, filename: str, purpose: str, file_id: str | None = None) -> StoredFile:
        """Takes over a file that was written; an `file_id` that exists is replaced."""
        added = StoredFile(
            file_id or f"file-{uuid4().hex}", content.stat().st_size, unix_seconds(), filename[:256], purpose
        )
        with content.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(content, self._files / f"{added.id}.data")
        self._write(self._files, added)
        return added

    def file(self, file_id: str) -> StoredFile:
        """Raises 404."""
        return self._read(self._files, file_id, StoredFile)

    def content(self, file_id: str) -> Path:
        return self._files / f"{self.file(file_id).id}.data"

    def delete_file(self, file_id: str) -> None:
        self.file(file_id)
        for kind in ("json", "data"):
            (self._files / f"{file_id}.{kind}").unlink(missing_ok=True)

    def files(self, after: str | None, limit: int) -> tuple[list[StoredFile], bool]:
        return _page(self._all(self._files, StoredFile), after, limit)

    # -----------------------------------------------------------------------------------------------------------
    # Batches.

    def new_batch(self, input_file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None) -> Batch:
        """window: see `window_s`."""
        now = unix_seconds()
        made = Batch(f"batch-{uuid4().hex}", endpoint, input_file_id, now, completion_window=window, metadata=metadata)
        made = msgspec.structs.replace(made, expires_at=now + window_s(window))
        self.save(made)
        return made

    def save(self, batch: Batch) -> None:
        self._write(self._batches, batch)

    def batch(self, batch_id: str) -> Batch:
        """Raises 404."""
        return self._read(self._batches, batch_id, Batch)

    def batches(self, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        return _page(self._all(self._batches, Batch), after, limit)

    def unfinished(self) -> list[Batch]:
        """The oldest first."""
        left = [one for one in self._all(self._batches, Batch) if not one.is_over]
        return sorted(left, key=lambda one: (one.created_at, one.id))

    def results(self, batch: Batch) -> Path:
        return self._batches / f"{batch.id}.results"

    def drop_results(self, batch: Batch) -> None:
        for path in (self.results(batch), Path(f"{self.results(batch)}.journal")):
            path.unlink(missing_ok=True)

    # -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _write(folder: Path, value: StoredFile | Batch) -> None:
        replace_file(str(folder / f"{value.id}.json"), msgspec.json.encode(value))

    @staticmethod
    def _read(folder: Path, name: str, kind: type[T]) -> T:
        path = folder / f"{name}.json"
        if not _ID.fullmatch(name) or not path.exists():
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no {name[:64]!r}; list what there is", param="id")
        return msgspec.json.decode(path.read_bytes(), type=kind)

    @staticmethod
    def _all(folder: Path, kind: type[T]) -> Iterator[T]:
        for path in folder.glob("*.json"):
            yield msgspec.json.decode(path.read_bytes(), type=kind)


def window_s(window: str) -> int:
    """Seconds of "24h", "90m", "7d". Raises 400."""
    found = _WINDOW.fullmatch(window)
    if found is None:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"completion_window={window[:64]!r}: give a time such as '24h', '90m' or '7d'",
            param="completion_window",
        )
    return int(found[1]) * _UNIT_S[found[2]]


def _page(every: Iterator[T], after: str | None, limit: int) -> tuple[list[T], bool]:
    """The newest first, those after the one of an id; and whether there are more."""
    newest = sorted(every, key=lambda one: (one.created_at, one.id), reverse=True)
    if after is not None:
        newest = newest[[one.id for one in newest].index(after) + 1 :] if after in {one.id for one in newest} else []
    limit = max(1, min(limit, _MAX_PAGE))
    return newest[:limit], len(newest) > limit
