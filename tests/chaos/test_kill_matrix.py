"""SIGKILL of every process of an engine at every point of its life: errors that say so, and nothing left."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import defaultdict

import pytest
from chaos_plan import FRONT_END
from kill_points import GROUP, Point, all_points
from scenarios import FrontEnd

SHORT_KILLS, LONG_KILLS = 134, 1000
NUM_AT_ONCE = 3
MAX_FAILURES = 60  # it is not the first that tells the most


def plan_kills(num_kills: int, rng: random.Random) -> list[tuple[Point, str, int]]:
    """Every point with some of its victims, of which there is one more at a time until the number is reached: the
    short form has each point twice, the long one has each with each victim several times."""
    rows = [(point, rng.sample(point.victims, len(point.victims))) for point in all_points()]
    kills = []
    for turn in itertools.count():
        for point, victims in rows:
            if len(kills) == num_kills:
                rng.shuffle(kills)
                return kills
            later = point.shifted(rng.randrange(40)) if turn >= len(victims) else point
            kills.append((later, victims[turn % len(victims)], rng.randrange(1 << 30)))
    raise AssertionError


class Matrix:
    """Works off the kills in a few threads, each with a front end that it replaces when that was killed."""

    def __init__(self, folder, tmp_path, kills) -> None:
        self._folder, self._tmp_path = folder, tmp_path
        self._numbers = itertools.count()
        self._left: queue.SimpleQueue = queue.SimpleQueue()
        for kill in kills:
            self._left.put(kill)
        self.failures: list[str] = []
        self.outcomes: dict[tuple[str, str], list] = defaultdict(list)
        self.num_done = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(NUM_AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        front_end = None
        try:
            while len(self.failures) < MAX_FAILURES:
                try:
                    point, victim, seed = self._left.get_nowait()
                except queue.Empty:
                    break
                if front_end is None:
                    front_end = FrontEnd(self._folder, self._tmp_path / f"front{next(self._numbers)}")
                try:
                    outcome = front_end.kill(point, victim, seed)
                except Exception as error:
                    self.failures.append(str(error))
                else:
                    self.outcomes[point.phase, point.name].append(outcome)
                    self.num_done += 1
                if not front_end.is_alive:
                    front_end.close()
                    front_end = None
            if front_end is not None:
                front_end.check_serves()
        except Exception as error:
            self.failures.append(f"a new engine does not serve: {error}")
        finally:
            if front_end is not None:
                front_end.close()

    def table(self) -> str:
        lines = [f"{'phase':10}{'point':52}{'kills':>6}{'error ms':>10}{'gone ms':>9}"]
        for phase, name in dict.fromkeys((point.phase, point.name) for point in all_points()):
            outcomes = self.outcomes[phase, name]
            if not outcomes:
                continue
            errors = [outcome.error_s for outcome in outcomes if outcome.error_s is not None]
            error_ms = f"{max(errors) * 1e3:.0f}" if errors else "-"
            gone_ms = max(outcome.gone_s for outcome in outcomes) * 1e3
            lines.append(f"{phase:10}{name:52}{len(outcomes):>6}{error_ms:>10}{gone_ms:>9.0f}")
        return "\n".join(lines)


def test_the_matrix_is_large_enough():
    points = all_points()
    assert len({(point.phase, point.name) for point in points}) == len(points) >= 24
    assert {FRONT_END, GROUP} <= {victim for point in points for victim in point.victims}


@pytest.fixture(scope="module")
def matrix(model_folder, tmp_path_factory, is_long, seed) -> Matrix:
    """All kills, done once."""
    kills = plan_kills(LONG_KILLS if is_long else SHORT_KILLS, random.Random(seed))
    matrix = Matrix(model_folder, tmp_path_factory.mktemp("matrix"), kills)
    started = time.monotonic()
    matrix.run()
    print(f"\n{matrix.num_done} kills in {time.monotonic() - started:.0f} s\n{matrix.table()}")
    return matrix


@pytest.mark.timeout(600)
def test_every_kill_is_told_and_no_process_is_left(matrix, is_long):
    assert not matrix.failures, "\n\n".join(matrix.failures)
    assert matrix.num_done == (LONG_KILLS if is_long else SHORT_KILLS)
    assert all(outcomes for outcomes in matrix.outcomes.values())


def test_no_kill_leaves_a_file(matrix):
    left = {
        f"{phase}: {name}": [outcome.left for outcome in outcomes if outcome.left]
        for (phase, name), outcomes in matrix.outcomes.items()
    }
    assert {name: files for name, files in left.items() if files} == {}
