"""Results and their journal, cut wherever a kill, a power cut or a full disk may cut them."""

from __future__ import annotations

import gzip
import os
import random
import resource
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from jobs import lines_of, make_job, outcome, resume

from ringcore.batch import disk
from ringcore.batch.journal import Journal
from ringcore.batch.results import Results
from ringcore.errors import ConfigError, RingcoreError

READ = {
    "none": lambda data: data,
    "gzip": lambda data: gzip.decompress(data) if data else b"",
    "zstd": lambda data: zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read(),
}
NUM_LINES = 12


class Tape:
    """Every write to the files, as (name, offset, bytes), in order."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self.writes, self.is_recording = folder, [], True
        monkeypatch.setattr("ringcore.batch.results.append", self._append)
        monkeypatch.setattr("ringcore.batch.journal.append", self._append)

    def _append(self, fd: int, data: bytes, end: int, path: str) -> int:
        if self.is_recording:
            self.writes.append((Path(path).name, end, data))
        return disk.append(fd, data, end, path)

    def play(self, folder: Path, num_writes: int, num_bytes: int) -> None:
        """The files after the first writes, and the first bytes of the next one."""
        folder.mkdir()
        header = (self.folder / "journal").read_bytes().partition(b"\n")[0] + b"\n"
        files = {"journal": bytearray(header), "out": bytearray()}
        for i, (name, end, data) in enumerate(self.writes[: num_writes + 1]):
            assert len(files[name]) == end
            files[name] += data if i < num_writes else data[:num_bytes]
        for name, data in files.items():
            (folder / name).write_bytes(data)


@pytest.fixture
def tape(tmp_path, monkeypatch):
    folder = tmp_path / "whole"
    folder.mkdir()
    return Tape(folder, monkeypatch)


def write_whole(tape: Tape, compression: str) -> None:
    """Frames of one to three results where they are compressed; a sync now and then."""
    results = Results.create(str(tape.folder / "out"), str(tape.folder / "journal"), make_job(NUM_LINES, compression))
    for line in range(1, NUM_LINES + 1):
        results.add(outcome(line, is_failed=line == 5))
        if line % 3 == 0:
            results.flush()
        if line in (4, 7):
            results.sync()
    results.close()
    tape.is_recording = False


@pytest.mark.parametrize("compression", READ)
def test_a_kill_at_any_byte_costs_what_was_being_written(tape, tmp_path, compression):
    """And the resumed job writes each line once."""
    write_whole(tape, compression)
    for number, (_, _, data) in enumerate(tape.writes):
        for num_bytes in {0, 1, len(data) // 2, len(data) - 1}:
            folder = tmp_path / "cut"
            tape.play(folder, number, num_bytes)
            results = resume(folder)
            missing = [line for line in range(1, NUM_LINES + 1) if not results.done.is_done(line)]
            num_written = sum(1 for name, _, _ in tape.writes[:number] if name == "journal")
            assert results.done.num_done == NUM_LINES - len(missing)
            assert (results.done.num_done > 0) == (num_written > 0)
            if compression == "none":  # a line a record, and two records are syncs
                assert results.done.num_done >= num_written - 2
            for line in missing:
                results.add(outcome(line, is_failed=line == 5))
            results.sync()
            assert (results.done.num_done, results.done.num_failed) == (NUM_LINES, 1)
            assert results.done.output_tokens == 2 * sum(range(NUM_LINES + 1))
            results.close()
            assert sorted(lines_of(READ[compression]((folder / "out").read_bytes()))) == list(range(1, NUM_LINES + 1))
            again = resume(folder)
            assert (again.done.num_done, again.done.num_failed) == (NUM_LINES, 1)
            again.close()
            shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_may_lose_anything_since_the_sync(tape, tmp_path, seed):
    """Pages of either file are missing or zero behind what was synced: whole lines alone are kept."""
    write_whole(tape, "none")
    rng, folder = random.Random(seed), tmp_path / "cut"
    tape.play(folder, len(tape.writes), 0)
    record_bytes = len(next(data for name, _, data in tape.writes if name == "journal"))
    mark = max(i for i, (name, _, _) in enumerate(tape.writes) if name == "journal" and tape.writes[i - 1][0] == name)
    synced = {"out": 0, "journal": len((folder / "journal").read_bytes().partition(b"\n")[0]) + 1}
    for name, end, data in tape.writes[: mark + 1]:
        synced[name] = end + len(data)
    for name, kept in synced.items():
        data = bytearray((folder / name).read_bytes())
        for _ in range(3):  # as sectors that were never written
            first = rng.randrange(kept, len(data) + 1)
            data[first : first + record_bytes] = bytes(len(data[first : first + record_bytes]))
        (folder / name).write_bytes(data[: rng.randrange(kept, len(data) + 1)])
    results = resume(folder)
    done = [line for line in range(1, NUM_LINES + 1) if results.done.is_done(line)]
    assert set(range(1, 8)) <= set(done)  # what was synced
    results.close()
    assert lines_of((folder / "out").read_bytes()) == done


def test_results_that_were_cut_by_someone_are_refused(tape):
    write_whole(tape, "none")
    os.truncate(tape.folder / "out", 10)
    with pytest.raises(RingcoreError, match=r"has 10 bytes, and \d+ of them were written and synced"):
        resume(tape.folder)


def test_one_process_at_a_time(tape):
    write_whole(tape, "none")
    first = resume(tape.folder)
    with pytest.raises(ConfigError, match="another process runs this job"):
        resume(tape.folder)
    first.close()
    resume(tape.folder).close()


def test_a_file_that_is_no_journal(tmp_path):
    (tmp_path / "journal").write_text('{"version":7}\n')
    with pytest.raises(ConfigError, match="is no journal of this version"):
        Journal.open(str(tmp_path / "journal"))


def test_results_while_others_are_synced(tape, tmp_path):
    """The mark of a sync comes after the records of results that it does not cover."""
    results = Results.create(str(tape.folder / "out"), str(tape.folder / "journal"), make_job(NUM_LINES))
    for line in (1, 2):
        results.add(outcome(line))
    end = results.unsynced_end
    results.sync_data()
    results.add(outcome(3))
    results.mark_synced(end)
    results.add(outcome(4))
    results.close()
    with open(tape.folder / "out", "r+b") as file:  # the third never reached the disk
        file.seek(end)
        file.write(bytes(10))
    again = resume(tape.folder)
    assert [line for line in range(1, 5) if again.done.is_done(line)] == [1, 2]
    again.close()
    assert lines_of((tape.folder / "out").read_bytes()) == [1, 2]


def fill(results: Results) -> int:
    """Adds results until the disk is full; the first line that found no room."""
    for line in range(1, NUM_LINES * 100):
        with suppress(RingcoreError):
            results.add(outcome(line))
            continue
        with pytest.raises(RingcoreError, match="make room, or mend it, and run again with --resume"):
            results.flush()  # it is tried again
        return line
    raise AssertionError("it was never full")


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 16 pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def check_full(folder: Path, make_room) -> None:
    results = Results.create(str(folder / "out"), str(folder / "journal"), make_job(NUM_LINES * 100))
    line = fill(results)
    results.close()
    written = lines_of((folder / "out").read_bytes())  # a part of a line is cut at once
    assert written in (list(range(1, line)), list(range(1, line + 1)))  # the last without its record
    make_room()
    again = resume(folder)
    assert again.done.num_done == line - 1
    again.add(outcome(line))
    again.close()
    assert lines_of((folder / "out").read_bytes()) == list(range(1, line + 1))


def test_a_full_disk(tiny_disk):
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(32 << 10))
    check_full(tiny_disk, ballast.unlink)


def test_a_limit_of_the_size_of_files(tmp_path):
    """A write that is taken in part, where nothing may be mounted either."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, before[1]))
        check_full(tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
