"""A search for the fastest tiles of a model's products on this device (`kernel_autotune`).

The products of steps of `ROWS` rows are recorded, and those of a shape timed by the tiles that can compute it, in their
place among the products of some layers: one after the other in a CUDA graph, by the model's own weights, until more
than the L2 cache is read. What is found is kept by device, versions and shape, so the next start searches nothing. The
first rank of a stage searches, and the others take what it found.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.launch.device_timer import PAST_L2_BYTES
from ringcore.kernels.linears.found_tiles import TileProblem, as_plain, of_plain
from ringcore.kernels.linears.skinny_configs import last_of_range
from ringcore.kernels.linears.skinny_tiles import Config
from ringcore.kernels.search.tile_candidates import candidates, grouped_candidates
from ringcore.model_executor.linear_schemes.searched_scheme import ProductCall, Recording, SearchedTiles
from ringcore.protocol.kernel_tuning import KernelTuning

__all__ = ["ROWS", "Bench", "search_tiles"]

_log = logging.getLogger(__name__)

# Rows of the decoding graphs that are captured first, the most common first. A range of rows has one configuration,
# which is timed with all that are of it.
ROWS = (1, 8, 16, 32, 2, 4, 64, 128, 256)
_CANDIDATES = 12
_ROUNDS = 3  # the fastest counts; candidates take turns
_LEAST_GAIN = 0.005  # of the time of the products around it: less is noise
_TOLERANCE = 1e-2  # of the norm: results are rounded to 16 bits
_BEFORE = 2  # products before the one that is timed: it begins while they run

Steps = Callable[[int], None]  # runs a step of so many rows, which the recording of `SearchedTiles` sees
Timer = Callable[[], float]  # seconds


class Bench(Protocol):
    """What the device does in a search."""

    def compile(self, launches: Sequence[Callable[[], object]]) -> None:
        """Compiles what these launch, without running it. What cannot be compiled fails when it is timed."""

    def timer(self, run: Callable[[], object]) -> Timer | None:
        """Seconds of `run`; None: it cannot be launched."""

    def result(self, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """None: it cannot be launched."""

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class _Linear:
    num_outputs: int
    num_inputs: int
    is_gated: bool
    num_rows: int


def search_tiles(tiles: SearchedTiles, step: Steps, bench: Bench, budget_s: float, tp: TensorParallel) -> KernelTuning:
    """Fills `tiles` with what is found, or was before, the same on all ranks of a stage, which call it together.
    budget_s: no shape is begun after so many seconds."""
    started = time.monotonic()
    recording, calls = Recording(), dict[int, list[ProductCall]]()
    for num_rows in ROWS:
        tiles.recording, recording.calls = recording, []
        try:
            step(num_rows)
        finally:
            tiles.recording = None
        calls[num_rows] = [call for call in recording.calls if call.num_rows == num_rows]
    search = _Search(tiles, recording, calls, bench)
    agreement = _Agreement(tp, bench.device)
    if tp.rank > 0:
        tiles.found.freeze(agreement.followed())
        return KernelTuning(num_shapes=len(search.problems))
    if tiles.found.can_record:
        tuning = search.run(started, started + budget_s, agreement.go_on)
    else:
        reason = "the user's cache cannot be written, and nothing is searched: other processes would not know of it"
        _log.warning("kernel_autotune: %s", reason)
        tuning = KernelTuning(num_shapes=len(search.problems), reason=reason)
    found = tiles.found.found
    agreement.end(found)
    tiles.found.freeze(found)
    return tuning


class _Agreement:
    """What the first rank finds is what all take. It says before each shape that it goes on, so that no rank waits
    longer in a collective than for one shape."""

    def __init__(self, tp: TensorParallel, device: torch.device) -> None:
        self._tp, self._device = tp, device

    def go_on(self) -> None:
        self._send(torch.zeros(1, dtype=torch.int64))

    def end(self, found: Mapping[TileProblem, Config | None]) -> None:
        content = msgspec.msgpack.encode([(problem, as_plain(config)) for problem, config in found.items()])
        self._send(torch.tensor([len(content)]))
        self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def followed(self) -> dict[TileProblem, Config | None]:
        """On the other ranks: what the first one ends with."""
        size = torch.zeros(1, dtype=torch.int64)
        while not int(size):
            size = self._send(size)
        content = self._send(torch.zeros(int(size), dtype=torch.uint8))
        return {problem: of_plain(plain) for problem, plain in _decode(content.numpy().tobytes())}

    def _send(self, numbers: torch.Tensor) -> torch.Tensor:
        """-> those of the first rank."""
        if self._tp.size == 1:
            return numbers
        on_device = numbers.to(self._device)
        self._tp.broadcast(on_device, 0)
        return on_device.cpu()


def _decode(content: bytes) -> list[tuple[TileProblem, dict[str, Any] | None]]:
    return msgspec.msgpack.decode(content, type=list[tuple[TileProblem, dict[str, Any] | None]])


class _Record(NamedTuple):
    measured: dict[str, Any] | None  # None: by another process


class _Search:
    def __init__(
        self, tiles: SearchedTiles, recording: Recording, calls: Mapping[int, list[ProductCall]], bench: Bench
    ) -> None:
        self._tiles, self._recording, self._calls, self._bench = tiles, recording, calls, bench
        weights: dict[TileProblem, int] = {}  # bytes in a step
        for call in (call for of_rows in calls.values() for call in of_rows):
            for problem in call.asked:
                weights[problem] = weights.get(problem, 0) + call.num_bytes
        rank = {last_of_range(num_rows): i for i, num_rows in reversed([*enumerate(ROWS)])}
        self.problems = sorted(weights, key=lambda one: (rank[one.max_rows], -weights[one]))

    def run(self, started: float, deadline: float, tick: Callable[[], None]) -> KernelTuning:
        """tick: called before each shape."""
        known, searched, reason = 0, list[dict[str, Any]](), ""
        for number, problem in enumerate(self.problems, 1):
            if problem in self._tiles.found.found:
                known += 1
                continue
            tick()
            try:
                record = self._search(problem) if time.monotonic() < deadline else None
            except torch.OutOfMemoryError as error:
                reason = "there was no memory beside the weights to time the others"
                _log.warning("kernel_autotune: %s: no memory to time it: %s", problem.shown, error)
                continue
            if record is None:
                reason = f"{time.monotonic() - started:.0f} s were not enough; the next start goes on"
                break
            known += 1
            if record.measured is not None:
                searched.append(record.measured)
            where = "found by another process" if record.measured is None else _in_words(record.measured)
            _log.info("kernel_autotune: %d of %d, %s: %s", number, len(self.problems), problem.shown, where)
        tuning = KernelTuning(
            num_shapes=len(self.problems),
            num_known=known,
            num_searched=len(searched),
            num_faster=sum(one["gain"] > 0 for one in searched),
            seconds=time.monotonic() - started,
            reason=reason,
        )
        _log.info("kernel_autotune: %s", tuning.in_words)
        return tuning

    def _search(self, problem: TileProblem) -> _Record | None:
        """None where it could not be recorded in time."""
        taken: list[dict[str, Any]] = []

        def measure() -> dict[str, Any]:
            taken.append(self._measured(problem))
            return taken[0]

        return _Record(taken[0] if taken else None) if self._tiles.found.search(problem, measure) else None

    def _measured(self, problem: TileProblem) -> dict[str, Any]:
        """The record of `problem`."""
        of_rows = {n: of_rows for n, calls in self._calls.items() if (of_rows := _window(calls, problem))}
        calls = [next(call for call in window if problem in call.asked) for window in of_rows.values()]
        chosen, tried = calls[0].asked[problem], _candidates(problem, calls[0].asked[problem])
        if tried == [chosen]:
            return _record_of(chosen, 0.0, 1)
        results = [partial(self._recording.result, call) for call in calls]
        self._bench.compile([self._by(problem, config, result) for config in tried for result in results])
        right = self._results(problem, None if problem.kind in ("dense", "packed") else chosen, calls)
        tried = [config for config in tried if config == chosen or self._is_right(problem, config, calls, right)]
        timers: dict[int, list[Timer]] = {}
        for i, config in enumerate(tried):
            runs = [self._by(problem, config, partial(self._recording.run, window)) for window in of_rows.values()]
            timed = [timer for run in runs if (timer := self._bench.timer(run)) is not None]
            if len(timed) == len(runs):
                timers[i] = timed
        seconds = dict.fromkeys(timers, math.inf)
        for _ in range(_ROUNDS):
            for i, each in timers.items():
                seconds[i] = min(seconds[i], sum(timer() for timer in each))
        best = min(seconds, key=lambda i: seconds[i], default=0)
        gain = 1 - seconds[best] / seconds[0] if 0 in seconds else 0.0
        return _record_of(*((tried[best], gain) if gain > _LEAST_GAIN else (chosen, 0.0)), len(seconds))

    def _is_right(
        self,
        problem: TileProblem,
        config: Config | None,
        calls: Sequence[ProductCall],
        right: Sequence[torch.Tensor | None],
    ) -> bool:
        """right: the results of cuBLAS; of what it does not compute, experts and rows rounded to FP8, those of the
        tiles that are chosen without a search."""
        for found, expected in zip(self._results(problem, config, calls), right, strict=True):
            if found is None or expected is None:
                return False
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            if not error <= _TOLERANCE:
                _log.warning("kernel_autotune: %s: %s is wrong by %.1e and never taken", problem.shown, config, error)
                return False
        return True

    def _results(
        self, problem: TileProblem, config: Config | None, calls: Sequence[ProductCall]
    ) -> list[torch.Tensor | None]:
        return [self._bench.result(self._by(problem, config, partial(self._recording.result, call))) for call in calls]

    def _by(self, problem: TileProblem, config: Config | None, run: Callable[[], Any]) -> Callable[[], Any]:
        """`run` with `problem` computed by `config`."""

        def by() -> Any:
            with self._tiles.found.trying(problem, config):
                return run()

        return by


def _candidates(problem: TileProblem, chosen: Config | None) -> list[Config | None]:
    """`chosen` first."""
    if problem.kind != "experts":
        linear = _Linear(problem.num_outputs, problem.num_inputs, problem.is_gated, problem.max_rows)
        return candidates(linear, problem.kind, problem.numbers, chosen, _CANDIDATES)
    return [*grouped_candidates(problem, chosen, _CANDIDATES)]


def _record_of(config: Config | None, gain: float, num_tried: int) -> dict[str, Any]:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"config": as_plain(config), "gain": gain, "num_tried": num_tried, "when": when}


def _window(calls: Sequence[ProductCall], problem: TileProblem) -> list[ProductCall]:
    """The first call of `problem` among those before and after it, as many as read more than the L2 cache holds; empty
    where there is none."""
    first = next((i for i, call in enumerate(calls) if problem in call.asked), None)
    if first is None:
        return []
    begin, end = max(0, first - _BEFORE), first + 1
    while sum(call.num_bytes for call in calls[begin:end]) < PAST_L2_BYTES and (begin or end < len(calls)):
        begin, end = (begin, end + 1) if end < len(calls) else (begin - 1, end)
    return list(calls[begin:end])


def _in_words(record: Mapping[str, Any]) -> str:
    took = f"of {record['num_tried']} tiles {record['config'] or 'cuBLAS'}"
    return f"{took}, {record['gain']:.1%} less with the products around it" if record["gain"] else f"{took}, as before"
