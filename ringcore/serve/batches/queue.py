"""Runs the batches of a service, the oldest first, beside its other requests and by the same engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from ringcore.batch.figures import Figures
from ringcore.batch.job_files import JobFiles
from ringcore.batch.journal import result_spans
from ringcore.batch.lines import Outcome
from ringcore.batch.options import BatchOptions
from ringcore.batch.runner import BatchRun
from ringcore.batch.shared_engine import SharedEngine
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.openai_api.errors import api_error_of
from ringcore.openai_api.served_model import unix_seconds
from ringcore.serve.batches.store import Batch, BatchStore, Counts
from ringcore.serve.service import Service

__all__ = ["BatchQueue"]

_log = logging.getLogger(__name__)

_End = Literal["cancelled", "completed", "expired"]


class BatchQueue:
    """Invariant: `_running` is the batch that `_job` runs, both None between batches. The stored batch has the state of
    its last change; its counts while it runs are those of `_job`."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self._store = service, store
        self._running: str | None = None
        self._job: BatchRun | None = None
        self._work: asyncio.Task[None] | None = None
        self._added = asyncio.Event()

    def start(self) -> None:
        """Begins to run what is stored, in the running loop. Idempotent."""
        self._added.set()
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._run_all())

    def batch(self, batch_id: str) -> Batch:
        """As it is now. Raises 404."""
        batch = self._store.batch(batch_id)
        if batch_id != self._running or self._job is None:
            return batch
        return msgspec.structs.replace(batch, request_counts=_counts(self._job))

    def cancel(self, batch_id: str) -> Batch:
        """Lets what is in flight finish."""
        batch = self.batch(batch_id)
        if batch.is_over or batch.status == "cancelling":
            return batch
        batch = self._change(batch_id, status="cancelling", cancelling_at=unix_seconds())
        if batch_id == self._running and self._job is not None:
            self._job.stop()
        self.start()
        return batch

    def _change(self, batch_id: str, **changes: object) -> Batch:
        batch = msgspec.structs.replace(self._store.batch(batch_id), **changes)
        self._store.save(batch)
        return batch

    # -----------------------------------------------------------------------------------------------------------

    async def _run_all(self) -> None:
        while True:
            self._added.clear()
            for batch in self._store.unfinished():
                try:
                    await self._run(batch)
                except EngineDeadError:  # the service ends with it; the next one goes on
                    return
                except Exception as error:  # a bug of ours costs this batch alone
                    _log.exception("%s failed", batch.id)
                    self._fail(batch.id, error)
                finally:
                    self._running = self._job = None
            await self._added.wait()

    async def _run(self, batch: Batch) -> None:
        results = str(self._store.results(batch))
        options = self._service.options
        files = JobFiles(
            self._store.content(batch.input_file_id),
            results,
            self._service.engine.config,
            options=BatchOptions(
                format="openai",
                served_model_names=tuple(self._service.model_names),
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                max_line_bytes=options.max_body_bytes,
            ),
            resumes=True,
            url=batch.endpoint,
        )

        def answerers(figures: Figures, deliver: Callable[[Outcome], None]) -> list[SharedEngine]:
            model = self._service.model.observed_by(figures.record)
            width, told = options.max_batch_requests_in_flight, (self._on_started(batch), self._expiry(batch))
            return [SharedEngine(model, width, deliver, *told)]

        self._running, self._job = batch.id, BatchRun(files, answerers)
        if batch.status == "cancelling":
            self._job.stop()
        await self._job.run()
        await self._finalize(batch.id, self._job)

    def _on_started(self, batch: Batch) -> Callable[[], None]:
        def started() -> None:
            if self._store.batch(batch.id).status == "validating":
                self._change(batch.id, status="in_progress", in_progress_at=unix_seconds())

        return started

    def _expiry(self, batch: Batch) -> Callable[[], bool]:
        """Whether the batch's window is over; stored before the first line hears of it, since a service that continues
        the batch must know that it has such lines."""
        is_stored = batch.expired_at is not None

        def has_expired() -> bool:
            nonlocal is_stored
            if batch.expires_at is None or unix_seconds() < batch.expires_at:
                return False
            if not is_stored:
                self._change(batch.id, expired_at=unix_seconds())
                is_stored = True
            return True

        return has_expired

    async def _finalize(self, batch_id: str, job: BatchRun) -> None:
        """Makes the two files of what is done. May be repeated after it was cut off."""
        batch = self._store.batch(batch_id)
        is_cancelled = batch.status == "cancelling"
        if not is_cancelled:
            batch = self._change(batch_id, status="finalizing", finalizing_at=unix_seconds())
        ids = await asyncio.to_thread(self._split, batch)
        end: _End = "cancelled" if is_cancelled else "completed" if batch.expired_at is None else "expired"
        self._change(
            batch_id,
            status=end,
            output_file_id=ids["output"],
            error_file_id=ids["error"],
            request_counts=_counts(job),
            **{f"{end}_at": unix_seconds()},
        )
        self._store.drop_results(batch)

    def _split(self, batch: Batch) -> dict[str, str | None]:
        """The ids of the files of results and of error records; None for one without a line."""
        results = self._store.results(batch)
        ids: dict[str, str | None] = {}
        for name, is_failed in (("output", False), ("error", True)):
            path, file_id = self._store.new_upload(), _file_id(batch, name)
            if results.exists() and _copy_spans(results, path, is_failed=is_failed):
                ids[name] = self._store.add_file(path, f"{batch.id}_{name}.jsonl", "batch_output", file_id).id
            else:
                ids[name] = None
                path.unlink(missing_ok=True)
        return ids

    def _fail(self, batch_id: str, error: Exception) -> None:
        message = error.message if isinstance(error, RingcoreError) else api_error_of(error).message
        told = {"code": "batch_failed", "message": message, "param": None, "line": None}
        with suppress(RingcoreError):
            self._change(batch_id, status="failed", failed_at=unix_seconds(), errors={"object": "list", "data": [told]})


def _counts(job: BatchRun) -> Counts:
    status = job.status
    return Counts(status.num_requests, status.num_done - status.num_failed, status.num_failed)


def _file_id(batch: Batch, name: str) -> str:
    return f"file-{blake2b(f'{batch.id} {name}'.encode(), digest_size=16).hexdigest()}"


def _copy_spans(results: Path, to: Path, *, is_failed: bool) -> int:
    """Copies the results of one kind; returns their bytes."""
    num_bytes = 0
    with results.open("rb") as source, to.open("wb") as copy:
        for begin, end, failed in result_spans(f"{results}.journal"):
            if failed == is_failed:
                source.seek(begin)
                num_bytes += copy.write(source.read(end - begin))
    return num_bytes
