"""What one process has measured, the others read; a file that is not whole is measured again."""

from __future__ import annotations

import fcntl
import json
import threading

import pytest

from ringcore.host.measurements import Measurements

KEY = {"processor": "one", "shape": "2 x 3"}


class Watch:
    """Counts how often it was asked to measure."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return {"a": (0.5, 1.0 * self.count), "b": (2.0, 3.0)}


@pytest.fixture
def watch():
    return Watch()


def seconds(folder, watch, key=KEY, names=("a", "b")):
    return Measurements(folder).seconds(key, names, 2, watch)


def the_file(folder):
    (found,) = folder.glob("*.json")
    return found


def test_once_for_a_key(tmp_path, watch):
    folder = tmp_path / "new"
    assert seconds(folder, watch) == {"a": (0.5, 1.0), "b": (2.0, 3.0)}
    assert seconds(folder, watch) == {"a": [0.5, 1.0], "b": [2.0, 3.0]}
    assert watch.count == 1
    assert seconds(folder, watch, KEY | {"processor": "two"})["a"] == (0.5, 2.0)
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".json", ".json"]  # nothing half-written


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"key": {}, "seconds": {}}',
        json.dumps({"key": KEY, "seconds": {"a": [1, 2]}}).encode(),
        json.dumps({"key": KEY, "seconds": {"a": [1, 2], "b": [1]}}).encode(),
        json.dumps({"key": KEY, "seconds": {"a": [1, 2], "b": [0, 1]}}).encode(),
        json.dumps({"key": KEY, "seconds": {"a": [1, 2], "b": [1, float("inf")]}}).encode(),
        json.dumps({"key": KEY, "seconds": {"a": [1, 2], "b": "12"}}).encode()[:-3],
        json.dumps({"key": KEY, "seconds": 7}).encode(),
    ],
)
def test_a_corrupt_file_is_measured_again(tmp_path, watch, content):
    seconds(tmp_path, watch)
    the_file(tmp_path).write_bytes(content)
    assert seconds(tmp_path, watch)["a"] == (0.5, 2.0)
    assert seconds(tmp_path, watch)["a"] == [0.5, 2.0]


def test_engines_that_start_together_measure_once(tmp_path):
    """Each opens the lock's file itself, as processes do."""
    watch, inside, found = Watch(), threading.Barrier(2), []

    def measure():
        inside.wait(10)  # the other two are on their way to the lock
        return watch()

    threads = [threading.Thread(target=lambda: found.append(seconds(tmp_path, measure))) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    for thread in threads:
        thread.join(10)
    assert watch.count == 1
    assert [[*each["a"]] for each in found] == [[0.5, 1.0]] * 3


def test_a_folder_that_cannot_be_written(tmp_path, watch):
    (tmp_path / "file").write_text("")
    assert seconds(tmp_path / "file", watch) is None
    assert watch.count == 0


def test_a_lock_that_is_never_released(tmp_path, watch):
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Measurements(tmp_path, lock_s=0.05).seconds(KEY, ("a", "b"), 2, watch) is None
    assert seconds(tmp_path, watch) is not None


def test_a_measurement_that_fails_leaves_nothing(tmp_path, watch):
    def fails():
        raise RuntimeError("no such operator")

    with pytest.raises(RuntimeError):
        seconds(tmp_path, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert seconds(tmp_path, watch) is not None


def test_what_is_no_time_is_kept_alike(tmp_path):
    found = Measurements(tmp_path / "new")
    assert found.newest() == (0, 0.0)
    assert found.can_record()
    assert found.read(KEY, "tile", int) is None
    assert found.recorded(KEY, "tile", int, str, lambda: 3) == 3
    assert found.recorded(KEY, "tile", int, str, lambda: 4) == 3
    assert found.read(KEY, "tile", int) == 3
    assert found.read(KEY, "another", int) is None
    count, when = found.newest()
    assert (count, when > 0) == (1, True)
    (tmp_path / "file").write_text("")
    assert not Measurements(tmp_path / "file").can_record()
