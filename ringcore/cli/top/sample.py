"""What is asked of an engine at one moment, and what two such moments say about the time between them."""

from __future__ import annotations

from typing import Any

import msgspec

from ringcore.protocol.introspection import EngineSnapshot

__all__ = ["Pace", "Sample", "WorkerSample", "pace_between"]


class WorkerSample(msgspec.Struct, frozen=True):
    """One worker. usage: its `stats`; memory: its `memory`, in bytes by name, which is asked more rarely."""

    rank: int
    usage: dict[str, Any] = {}
    memory: dict[str, Any] = {}


class Sample(msgspec.Struct, frozen=True):
    """workers: those that answered; workers_error: why there are none. device: what "auto" became."""

    engine: EngineSnapshot
    workers: list[WorkerSample] = []
    workers_error: str | None = None
    device: str | None = None


class Pace(msgspec.Struct, frozen=True):
    """Between two samples. Fractions are of one CPU core, or None where they are not known."""

    seconds: float
    generated_tokens_per_s: float
    scheduled_tokens_per_s: float
    steps_per_s: float
    preemptions_per_s: float
    prefix_hit_rate: float | None  # of the prompt tokens that were looked up; None: none were
    draft_acceptance: float | None  # of the drafts that were verified; None: none were
    engine_cpu: float | None
    worker_cpu: dict[int, float]  # by rank


def pace_between(before: Sample, after: Sample) -> Pace | None:
    """None unless both are of one engine, in this order."""
    old, new = before.engine, after.engine
    seconds = new.taken_s - old.taken_s
    if seconds <= 0 or new.about.pids.get("engine") != old.about.pids.get("engine") or new.num_steps < old.num_steps:
        return None
    queried = new.num_prefix_query_tokens - old.num_prefix_query_tokens
    hit = new.num_prefix_hit_tokens - old.num_prefix_hit_tokens
    drafted = (new.num_draft_tokens or 0) - (old.num_draft_tokens or 0)
    accepted = (new.num_accepted_tokens or 0) - (old.num_accepted_tokens or 0)
    return Pace(
        seconds=seconds,
        generated_tokens_per_s=(new.num_generated_tokens - old.num_generated_tokens) / seconds,
        scheduled_tokens_per_s=(new.num_scheduled_tokens - old.num_scheduled_tokens) / seconds,
        steps_per_s=(new.num_steps - old.num_steps) / seconds,
        preemptions_per_s=(new.num_preemptions - old.num_preemptions) / seconds,
        prefix_hit_rate=hit / queried if queried > 0 else None,
        draft_acceptance=accepted / drafted if drafted > 0 else None,
        engine_cpu=(new.cpu_s - old.cpu_s) / seconds,
        worker_cpu=_worker_cpu(before, after, seconds),
    )


def _worker_cpu(before: Sample, after: Sample, seconds: float) -> dict[int, float]:
    """A worker that was replaced in between has used less than before: it is left out."""
    old = {worker.rank: worker.usage.get("cpu_s") for worker in before.workers}
    found = {}
    for worker in after.workers:
        began, now = old.get(worker.rank), worker.usage.get("cpu_s")
        if began is not None and now is not None and now >= began:
            found[worker.rank] = (now - began) / seconds
    return found
