"""`ringcore.batch.run`: a job as a call."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

from ringcore.batch.chart import check_can_draw, draw_png
from ringcore.batch.figures import Figures
from ringcore.batch.job_files import JobFiles
from ringcore.batch.lines import Outcome
from ringcore.batch.on_ray.engines import EnginesOnRay
from ringcore.batch.options import BatchOptions
from ringcore.batch.replica import Replica
from ringcore.batch.runner import BatchRun
from ringcore.config import EngineConfig
from ringcore.front_end.replicas.device_groups import options_of_engines

__all__ = ["BatchSummary", "run", "run_job"]

_WORKER_RESTARTS = 4  # unless the options say otherwise: cheaper than another engine


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """A job after a run of it. Counts and tokens are of the job; seconds, percentiles and the hit rate of this run.

    percentiles: "p50", "p90" and "p99" of the seconds "ttft_s" (to the first token), "e2e_s" and "queue_s".
    signal: by which the run was stopped; None if the job is complete.
    """

    output: str
    num_requests: int
    num_done: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    cache_hit_rate: float
    num_engine_restarts: int
    percentiles: dict[str, dict[str, float]]
    signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """0; 1 if requests failed; 128 and the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.num_failed else 0


def run(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    sampling: Mapping[str, Any] | None = None,
    resume: bool = False,
    status: str | os.PathLike[str] | None = None,
    chart: str | os.PathLike[str] | None = None,
    use_tqdm: bool = True,
    **options: Any,
) -> BatchSummary:
    """Answers every line of `input` in `output`, and returns when all are; blocks meanwhile.

    input, output: paths, or URLs with the extra `batch`. sampling: parameters of plain lines that do not have them.
    resume: continue a job that was begun. status: a JSON file, replaced twice a second. chart: a PNG, at the end.
    options: those of `BatchOptions` and of the engine.

    Raises `RingcoreError` if the job cannot run, and `KeyboardInterrupt` after Ctrl-C, when what was in flight is done;
    in both cases what is done is kept, and `resume` continues. A second Ctrl-C does not wait.
    """
    own = {f.name for f in fields(BatchOptions)}
    batch = BatchOptions(**{name: value for name, value in options.items() if name in own})
    engine = {name: value for name, value in options.items() if name not in own} | {"model": model}
    summary = run_job(
        input,
        output,
        engine,
        batch,
        sampling=sampling,
        resume=resume,
        status=status,
        chart=chart,
        shows_progress=use_tqdm,
        signals=(signal.SIGINT,),
    )
    if summary.signal is not None:
        raise KeyboardInterrupt
    return summary


def run_job(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    engine_options: Mapping[str, Any],
    options: BatchOptions,
    *,
    sampling: Mapping[str, Any] | None,
    resume: bool,
    status: str | os.PathLike[str] | None,
    chart: str | os.PathLike[str] | None,
    shows_progress: bool,
    signals: Sequence[signal.Signals],
    on_second_signal: Callable[[int], None] | None = None,
) -> BatchSummary:
    """As `run`. signals: those that stop the run, where this is the main thread. on_second_signal: called in the
    handler with 128 and the signal; None cancels the run."""
    if chart is not None:
        check_can_draw()
    shared = {"max_worker_restarts": _WORKER_RESTARTS} | dict(engine_options)
    engines = _EnginesHere(shared, options) if options.ray is None else EnginesOnRay(shared, options)
    files = JobFiles(input, output, engines.config, defaults=sampling, options=options, resumes=resume)
    job = BatchRun(
        files, engines.make, status_path=None if status is None else os.fspath(status), shows_progress=shows_progress
    )
    stopping = _Stopping(job, on_second_signal)
    with stopping.listening(signals):
        asyncio.run(stopping.run())
    if chart is not None:
        draw_png(
            job.figures, chart, title=f"{files.output}: {job.status.num_done:,} of {job.status.num_requests:,} done"
        )
    return _summary(files, job, stopping.signal)


class _EnginesHere:
    """config: of each engine."""

    def __init__(self, shared: Mapping[str, Any], options: BatchOptions) -> None:
        self._engines, self._options = options_of_engines(shared, options.data_parallel), options
        self.config = EngineConfig.from_options(**self._engines[0])

    def make(self, figures: Figures, deliver: Callable[[Outcome], None]) -> list[Replica]:
        return [Replica(one, self._options, figures, deliver) for one in self._engines]


class _Stopping:
    """Runs a job until a signal stops it.

    signal: that stopped it; None for one that came after the job was complete.
    """

    def __init__(self, job: BatchRun, on_second_signal: Callable[[int], None] | None) -> None:
        self._job, self._on_second_signal = job, on_second_signal
        self._task: asyncio.Task[None] | None = None
        self.signal: signal.Signals | None = None

    async def run(self) -> None:
        self._task = asyncio.current_task()
        if self.signal is not None:
            self._job.stop()
        await self._job.run()
        if self._job.status.state == "complete":
            self.signal = None

    @contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        is_second, self.signal = self.signal is not None, signal.Signals(number)
        if is_second and self._on_second_signal is not None:
            self._on_second_signal(128 + number)
        elif self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel if is_second else self._job.stop)


def _summary(files: JobFiles, job: BatchRun, stopped_by: signal.Signals | None) -> BatchSummary:
    status, done = job.status, job.status.done
    return BatchSummary(
        output=files.output,
        num_requests=status.num_requests,
        num_done=status.num_done,
        num_failed=status.num_failed,
        prompt_tokens=0 if done is None else done.prompt_tokens,
        output_tokens=0 if done is None else done.output_tokens,
        elapsed_s=job.figures.elapsed_s,
        cache_hit_rate=job.figures.cache_hit_rate,
        num_engine_restarts=status.num_restarts,
        percentiles=job.figures.percentiles(),
        signal=stopped_by,
    )
