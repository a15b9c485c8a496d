"""SIGKILL of every process of an engine at every point of its life: errors that say so, and nothing left."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter, defaultdict

import pytest
from chaos_plan import FRONT_END
from kill_points import GROUP, Point, all_points
from scenarios import FrontEnd, ScenarioFailed

LONG_KILLS = 1000
NUM_AT_ONCE = 3
MAX_FAILURES = 60  # it is not the first that tells the most


Kill = tuple[Point, str, int]  # where, who, and the seed of what the front end does


def plan_short(rng: random.Random) -> list[Kill]:
    """Every point once, and in every phase each victim: a point has the one that its phase has had least often."""
    points = all_points()
    pairs = {(point.phase, victim) for point in points for victim in point.victims}
    num_kills: Counter[tuple[str, str]] = Counter()
    kills: list[Kill] = []
    while not kills or num_kills.keys() < pairs:
        for point in points:
            victims = rng.sample(point.victims, len(point.victims))
            victim = min(victims, key=lambda victim, point=point: num_kills[point.phase, victim])
            if len(kills) < len(points) or not num_kills[point.phase, victim]:
                num_kills[point.phase, victim] += 1
                kills.append((point, victim, rng.randrange(1 << 30)))
    rng.shuffle(kills)
    return kills


def plan_long(num_kills: int, rng: random.Random) -> list[Kill]:
    """Every point with each of its victims, again and again until the number is reached."""
    rows = [(point, rng.sample(point.victims, len(point.victims))) for point in all_points()]
    kills: list[Kill] = []
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
        self.num_planned = len(kills)
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


@pytest.mark.parametrize("seed", range(20))
def test_the_short_form_has_every_point_and_in_every_phase_every_victim(seed):
    points, kills = all_points(), plan_short(random.Random(seed))
    assert {(point.phase, point.name) for point, _, _ in kills} == {(point.phase, point.name) for point in points}
    pairs = {(point.phase, victim) for point in points for victim in point.victims}
    assert {(point.phase, victim) for point, victim, _ in kills} == pairs
    assert len(points) <= len(kills) < len(points) + 10
    assert all(victim in point.victims for point, victim, _ in kills)


def test_a_scenario_that_fails_tells_where_each_process_is(model_folder, tmp_path, monkeypatch):
    def fail(*args):
        raise AssertionError("nobody is killed")

    monkeypatch.setattr(FrontEnd, "_end_victim", fail)
    (point,) = (point for point in all_points() if point.name == "worker 1 is made")
    with pytest.raises(ScenarioFailed, match="worker 1 is made, engine killed: nobody is killed") as failed:
        FrontEnd(model_folder, tmp_path / "front").kill(point, "engine")
    text = str(failed.value)
    assert text.count("\nprocess ") == text.count("thread 'MainThread'") == 4, text
    assert text.count(", in _stop_here\n") == 1, text
    assert text.count(", in wait_ready\n") == 1, text


@pytest.fixture(scope="module")
def matrix(model_folder, tmp_path_factory, is_long, seed) -> Matrix:
    """All kills, done once."""
    rng = random.Random(seed)
    kills = plan_long(LONG_KILLS, rng) if is_long else plan_short(rng)
    matrix = Matrix(model_folder, tmp_path_factory.mktemp("matrix"), kills)
    started = time.monotonic()
    matrix.run()
    print(f"\n{matrix.num_done} kills in {time.monotonic() - started:.0f} s\n{matrix.table()}")
    return matrix


@pytest.mark.timeout(600)
def test_every_kill_is_told_and_no_process_is_left(matrix):
    assert not matrix.failures, "\n\n".join(matrix.failures)
    assert matrix.num_done == matrix.num_planned
    assert all(outcomes for outcomes in matrix.outcomes.values())


def test_no_kill_leaves_a_file(matrix):
    left = {
        f"{phase}: {name}": [outcome.left for outcome in outcomes if outcome.left]
        for (phase, name), outcomes in matrix.outcomes.items()
    }
    assert {name: files for name, files in left.items() if files} == {}
