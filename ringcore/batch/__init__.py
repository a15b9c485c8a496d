"""Offline batch jobs: a file of requests in, a file of results out, and a journal by which a job resumes after any end.

    summary = ringcore.batch.run("in.jsonl", "out.jsonl", model="path/to/model")

Read `runner.py` first.
"""

from __future__ import annotations

from typing import Any

from ringcore.batch.options import BatchOptions

__all__ = ["BatchOptions", "BatchSummary", "run"]


def __getattr__(name: str) -> Any:
    """The command line needs only the options to show its help."""
    if name in ("BatchSummary", "run"):
        from ringcore.batch import api

        return api.run if name == "run" else api.BatchSummary
    raise AttributeError(f"module 'ringcore.batch' has no attribute {name!r}")
