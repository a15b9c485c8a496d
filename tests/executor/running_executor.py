"""A MultiprocExecutor with fake workers, for the length of a block."""

from __future__ import annotations

import contextlib

from fake_worker import FACTORY, fake_config

from ringcore.executor.multiproc import MultiprocExecutor


@contextlib.contextmanager
def running(num_ranks: int = 1, trouble: str = "", **parallel):
    executor = MultiprocExecutor(fake_config(num_ranks, trouble, **parallel), worker_factory=FACTORY)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown()
