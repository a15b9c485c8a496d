"""A service on a loopback port: the real engine process on fake workers, its HTTP server in a thread of the test's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace

import httpx
from fake_engine import FakeMultiproc, expected, hurried

from ringcore import AsyncEngine
from ringcore.cli.serve import bind
from ringcore.front_end.replicas.replica_set import ReplicaSet
from ringcore.serve import ServiceOptions, create_app
from ringcore.serve.server import HttpServer, http_config

OPTIONS = {
    "load_format": "dummy",
    "executor": FakeMultiproc,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks_override": 2000,
    "enable_sleep_mode": True,
}
DEADLINE_S = 60.0  # of what takes milliseconds, on a machine that may be busy with anything
# httpx's own functions wait 5 s for an answer.
http = SimpleNamespace(
    **{name: partial(getattr(httpx, name), timeout=DEADLINE_S) for name in ("get", "post", "request", "stream")}
)


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Waits until something holds that other threads bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


class RunningService:
    """`url` is where it listens; `call` runs a coroutine in its event loop."""

    def __init__(self, folder: str, engine_options: dict, options: ServiceOptions) -> None:
        self._folder, self._engine_options, self._options = folder, engine_options, options
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        try:
            kind = ReplicaSet if "data_parallel_size" in self._engine_options else AsyncEngine
            async with kind(self._folder, **self._engine_options) as self.engine:
                app = create_app(self.engine, self._options)
                self.service, self.service_app = app.state.service, app
                config = http_config(app, self._options, log_config=None, timeout_graceful_shutdown=2)
                self._server = HttpServer(config)
                with bind("127.0.0.1", 0) as listening:
                    self.port = listening.getsockname()[1]
                    self.url = f"http://127.0.0.1:{self.port}"
                    self._loop = asyncio.get_running_loop()
                    serving = asyncio.create_task(self._server.serve([listening]))
                    while not self._server.started and not serving.done():
                        await asyncio.sleep(0.001)
                    self._started.set()
                    await serving
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._started.set()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def hurried(self) -> AbstractContextManager[None]:
        """See `fake_engine.hurried`."""
        return hurried(self._folder)

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return self.call(count())

    def is_idle(self) -> bool:
        """Whether no request has left anything in the service or the engine."""
        stats = self.engine.stats
        return (
            self.service.concurrency.num_in_flight == 0
            and self.engine.num_unfinished == 0
            and stats.num_running == stats.num_waiting == 0
            and stats.num_free_blocks == self.engine.ready.num_blocks
        )

    def __enter__(self) -> RunningService:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def served(folder: str, engine_options: dict | None = None, **options) -> RunningService:
    """The real engine in `folder`, with these `ServiceOptions`."""
    return RunningService(folder, OPTIONS | (engine_options or {}), ServiceOptions(**options))
