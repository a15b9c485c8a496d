"""The journal beside a job's results: what the job is, and which lines are done, in records of fixed size.

    header    one line of JSON: the job, written whole before the first record
    result    line, end of its result in the results file, flags, tokens, CRC-32 of what was written with it
    sync      everything up to `end` is on the disk

The results file is the truth and the journal its index: a result is appended to the results first, then its record to
the journal. Results that were written at once (a compressed frame) have records of one `end`, the last of which is the
commit and has the CRC. After any end of the process, `recover` keeps the records up to the last commit that is
whole: those up to the last sync as they are, later ones if the results file has what their CRC says. What lies behind
them in either file is cut off, and those lines are run again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from ringcore.batch.disk import append, replace_file
from ringcore.batch.job import Job
from ringcore.errors import ConfigError, RingcoreError

__all__ = ["DoneLines", "Journal", "Record", "result_spans"]

_COMMIT, _FAILED, _SYNC = 1, 2, 4
_LAYOUT = struct.Struct("<QQIIII")
_WORDS = struct.Struct("<8I")
_CHECK = struct.Struct("<I")
_RECORD = np.dtype(
    {
        "names": ["line", "end", "crc", "flags", "prompt_tokens", "output_tokens", "check"],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u4"],
    }
)
_RECORD_BYTES = _RECORD.itemsize
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)
_SALT = 0x52494E47  # a record of zeros is none
_MAX_HEADER_BYTES = 1 << 20
_SCANNED_AT_ONCE = 1 << 18  # records


class Record(NamedTuple):
    """A result that was written. line: of the input, from 1."""

    line: int
    is_failed: bool
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class DoneLines:
    """What of a job is done. bits: one for each line, packed; end: of the results file, in bytes."""

    bits: np.ndarray
    num_lines: int
    end: int = 0
    num_done: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def none_of(cls, num_lines: int) -> DoneLines:
        return cls(np.zeros(num_lines // 8 + 1, dtype=np.uint8), num_lines)

    def is_done(self, line: int) -> bool:
        return line <= self.num_lines and bool(self.bits[line >> 3] >> (line & 7) & 1)

    def count(self, record: Record) -> None:
        self.bits[record.line >> 3] |= 1 << (record.line & 7)
        self.num_done += 1
        self.num_failed += record.is_failed
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += record.output_tokens

    def count_all(self, records: np.ndarray) -> None:
        lines = records["line"]
        np.bitwise_or.at(self.bits, lines >> np.uint64(3), np.uint8(1) << (lines & np.uint64(7)).astype(np.uint8))
        self.num_done += len(records)
        self.num_failed += int(np.count_nonzero(records["flags"] & _FAILED))
        self.prompt_tokens += int(records["prompt_tokens"].sum(dtype=np.uint64))
        self.output_tokens += int(records["output_tokens"].sum(dtype=np.uint64))


class Journal:
    """An open journal, locked against other processes until it is closed."""

    def __init__(self, path: str, fd: int, job: Job, records_from: int) -> None:
        self.path, self.job = path, job
        self._fd, self._records_from = fd, records_from
        self._end = os.fstat(fd).st_size

    @classmethod
    def create(cls, path: str, job: Job) -> Journal:
        """A new one. Raises `ConfigError` if there is one."""
        if os.path.exists(path):
            raise ConfigError(
                f"journal={path!r}: there is one already; continue its job with --resume, or give another output",
                option="journal",
                value=path,
            )
        replace_file(path, msgspec.json.encode(job) + b"\n")
        return cls.open(path)

    @classmethod
    def open(cls, path: str) -> Journal:
        """Raises `ConfigError` for a file that is no journal, and one that another process has."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _bad(path, f"cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            header = os.pread(fd, _MAX_HEADER_BYTES, 0).partition(b"\n")[0]
            return cls(path, fd, msgspec.json.decode(header, type=Job), len(header) + 1)
        except BlockingIOError as error:
            os.close(fd)
            raise _bad(path, "another process runs this job; wait for it, or end it") from error
        except (msgspec.DecodeError, OSError) as error:
            os.close(fd)
            raise _bad(path, f"is no journal of this version: {error}; give another output") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -----------------------------------------------------------------------------------------------------------
    # Writing.

    def add(self, records: Sequence[Record], end: int, crc: int) -> None:
        """Results that were appended at once, up to `end` of the results file."""
        *others, last = records
        written = b"".join(_encode(one, end, 0, 0) for one in others) + _encode(last, end, crc, _COMMIT)
        self._append(written)

    def add_sync(self, end: int) -> None:
        self._append(_encode(Record(0, False, 0, 0), end, 0, _SYNC))

    def _append(self, written: bytes) -> None:
        self._end = append(self._fd, written, self._end, self.path)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    # -----------------------------------------------------------------------------------------------------------
    # Recovery.

    def recover(self, results_fd: int, results_path: str) -> DoneLines:
        """What is done, after both files were cut to it."""
        done_lines = DoneLines.none_of(self.job.num_lines)
        records = self._records()
        num_whole = _num_whole(records)
        synced, synced_end = _last_sync(records[:num_whole])
        results_bytes = os.fstat(results_fd).st_size
        if synced_end > results_bytes:
            raise RingcoreError(
                f"{results_path}: it has {results_bytes} bytes, and {synced_end} of them were written and synced; "
                "the job cannot be resumed from a file that was cut: restore it, or begin anew with another output"
            )
        for first in range(0, synced, _SCANNED_AT_ONCE):
            part = records[first : min(first + _SCANNED_AT_ONCE, synced)]
            done_lines.count_all(part[part["flags"] & _SYNC == 0])
        done_lines.end = synced_end
        num_kept = self._verify(records[synced:num_whole], results_fd, done_lines) + synced
        os.ftruncate(results_fd, done_lines.end)
        self._end = self._records_from + num_kept * _RECORD_BYTES
        os.ftruncate(self._fd, self._end)
        return done_lines

    def _records(self) -> np.ndarray:
        num_bytes = self._end - self._records_from
        num = num_bytes // _RECORD_BYTES
        if not num:
            return np.empty(0, dtype=_RECORD)
        return np.memmap(self.path, dtype=_RECORD, mode="r", offset=self._records_from, shape=(num,))

    @staticmethod
    def _verify(records: np.ndarray, results_fd: int, done_lines: DoneLines) -> int:
        """Counts the records behind the last sync whose results are there; returns how many records to keep."""
        waiting: list[Record] = []
        num_kept = 0
        for index, (line, end, crc, flags, prompt_tokens, output_tokens, _) in enumerate(records.tolist()):
            if flags & _SYNC:
                continue
            waiting.append(Record(line, bool(flags & _FAILED), prompt_tokens, output_tokens))
            if not flags & _COMMIT:
                continue
            written = os.pread(results_fd, end - done_lines.end, done_lines.end)
            if end <= done_lines.end or len(written) < end - done_lines.end or zlib.crc32(written) != crc:
                break
            for one in waiting:
                done_lines.count(one)
            waiting.clear()
            done_lines.end, num_kept = end, index + 1
        return num_kept


def result_spans(path: str) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whether it is an error record) of each result of an uncompressed job, by its journal's path."""
    with open(path, "rb") as file:
        file.readline()
        begin = 0
        while part := file.read(_RECORD_BYTES * _SCANNED_AT_ONCE):
            records = np.frombuffer(part[: len(part) // _RECORD_BYTES * _RECORD_BYTES], dtype=_RECORD)
            for end, flags in zip(records["end"].tolist(), records["flags"].tolist(), strict=True):
                if not flags & _SYNC:
                    yield begin, end, bool(flags & _FAILED)
                    begin = end


def _encode(record: Record, end: int, crc: int, flags: int) -> bytes:
    flags |= _FAILED if record.is_failed else 0
    body = _LAYOUT.pack(record.line, end, crc, flags, record.prompt_tokens, record.output_tokens)
    words = zip(_WORDS.unpack(body), _FACTORS, strict=True)
    return body + _CHECK.pack((_SALT + sum(word * factor for word, factor in words)) & 0xFFFFFFFF)


def _num_whole(records: np.ndarray) -> int:
    """How many records there are before the first that is torn."""
    for first in range(0, len(records), _SCANNED_AT_ONCE):
        part = records[first : first + _SCANNED_AT_ONCE]
        words = np.ascontiguousarray(part).view("<u4").reshape(-1, _RECORD_BYTES // 4)
        with np.errstate(over="ignore"):
            sums = (words[:, :-1] * np.array(_FACTORS, dtype=np.uint32)).sum(axis=1, dtype=np.uint32) + np.uint32(_SALT)
        torn = np.flatnonzero(sums != words[:, -1])
        if len(torn):
            return first + int(torn[0])
    return len(records)


def _last_sync(records: np.ndarray) -> tuple[int, int]:
    """(how many records are of results that are on the disk, their end)."""
    for first in reversed(range(0, len(records), _SCANNED_AT_ONCE)):
        flags = records["flags"][first : first + _SCANNED_AT_ONCE]
        marks = np.flatnonzero(flags & _SYNC)
        if len(marks):
            mark = first + int(marks[-1])
            end = int(records["end"][mark])
            return _num_up_to(records[:mark], end), end
    return 0, 0


def _num_up_to(records: np.ndarray, end: int) -> int:
    """Results may be appended while others are synced: the mark of these comes after records of a later end."""
    num = len(records)
    while num and records["end"][num - 1] > end:
        num -= 1
    return num


def _bad(path: str, what: str) -> ConfigError:
    return ConfigError(f"journal={path!r}: {what}", option="journal", value=path)
