"""Files that are read ahead: whole, in pieces that the kernel reads, and only where there is room."""

from __future__ import annotations

import os

import pytest

from ringcore.host.page_cache import begin_reading_ahead

SIZES = (3 << 20, 1, (512 << 10) + 1)


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / str(size) for size in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(bytes(size))
    return [str(path) for path in paths]


@pytest.fixture
def advised(monkeypatch):
    """(file name, begin, bytes, advice) of each call."""
    calls = []

    def note(fd, begin, num_bytes, advice):
        calls.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), begin, num_bytes, advice))

    monkeypatch.setattr(os, "posix_fadvise", note)
    return calls


def test_all_of_each_file_in_order(files, advised):
    begin_reading_ahead(files, sum(SIZES)).join()
    expected = [(str(size), begin) for size in SIZES for begin in range(0, size, 512 << 10)]
    assert [(name, begin) for name, begin, _, _ in advised] == expected
    assert {(num_bytes, advice) for _, _, num_bytes, advice in advised} == {(512 << 10, os.POSIX_FADV_WILLNEED)}


def test_nothing_that_does_not_fit_or_is_not_there(files, advised, tmp_path):
    assert begin_reading_ahead(files, sum(SIZES) - 1) is None
    assert begin_reading_ahead([str(tmp_path / "none")], 1 << 30) is None
    assert begin_reading_ahead([], 1 << 30) is None
    assert advised == []


def test_a_file_that_cannot_be_read_costs_the_others_nothing(files, advised, monkeypatch):
    def refuse(fd, *arguments):
        advised.append(os.readlink(f"/proc/self/fd/{fd}"))
        raise OSError("no advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    begin_reading_ahead(files, sum(SIZES)).join()
    assert advised == files
