"""Runs a benchmark on its target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ringcore.bench.figures import Figures, read_slos
from ringcore.bench.load import Record, Target, arrival_times, play
from ringcore.bench.options import LatencyOptions, LoadOptions, PromptOptions, ReportOptions, TargetOptions
from ringcore.bench.prompts import BenchRequest, Lengths, PromptShape, make_prompts, read_dataset
from ringcore.bench.targets import EngineTarget, HttpTarget
from ringcore.checkpoint.tokenizer import Tokenizer, load_tokenizer
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.front_end.async_engine import AsyncEngine
from ringcore.http_client import OpenAIClient

__all__ = ["Bench"]

_NUM_PROMPTS = 1000


@dataclass(frozen=True)
class _Opened:
    target: Target
    tokenizer: Tokenizer | None
    name: str


@dataclass(frozen=True)
class Bench:
    """engine_options: of a model in this process. Every method raises `RingcoreError`."""

    target: TargetOptions
    prompts: PromptOptions
    report: ReportOptions
    engine_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if (self.target.url is None) == (self.target.model is None) and self.target.url is None:
            raise ConfigError("model: give --model, or --url", option="model", value=None)
        self.percentiles  # noqa: B018 - raises before a model is loaded

    @property
    def percentiles(self) -> list[float]:
        text = self.report.percentiles
        try:
            values = [float(part) for part in text.split(",")]
        except ValueError:
            values = [-1.0]
        if not all(0 <= value <= 100 for value in values):
            raise ConfigError(f"percentiles={text!r}: give numbers from 0 to 100, as 50,99", option="percentiles")
        return values

    def serve(self, load: LoadOptions) -> Figures:
        """A service's load: requests at a rate, or so many at once; streamed."""
        slos = read_slos(load.goodput or ())
        _check_load(load)

        async def run() -> list[Record]:
            async with self._opened(is_streamed=True) as opened:
                requests = self._requests(opened, load.num_warmups)
                await self._play(opened, requests[: load.num_warmups], None, load.max_concurrency)
                asked, times = requests[load.num_warmups :], None
                if load.request_rate is not None or load.max_concurrency is None:
                    rate = float("inf") if load.request_rate is None else load.request_rate
                    times = arrival_times(len(asked), rate, load.burstiness, self.prompts.prompt_seed)
                return await self._play(opened, asked, times, load.max_concurrency)

        return Figures(asyncio.run(run()), self.percentiles, slos)

    def throughput(self) -> Figures:
        """All requests at once, whole answers."""

        async def run() -> list[Record]:
            async with self._opened(is_streamed=False) as opened:
                requests = self._requests(opened, 0)
                return await self._play(opened, requests, [0.0] * len(requests), None)

        return Figures(asyncio.run(run()), self.percentiles)

    def latency(self, options: LatencyOptions) -> list[Figures]:
        """A batch of requests, over and over: the figures of each time."""

        async def run() -> list[list[Record]]:
            async with self._opened(is_streamed=False) as opened:
                size, num = options.batch_size, options.num_warmups + options.num_iters
                requests = self._requests(opened, 0, size * num)
                batches = [requests[i * size : (i + 1) * size] for i in range(num)]
                played = [await self._play(opened, batch, [0.0] * size, None) for batch in batches]
                return played[options.num_warmups :]

        for name in ("batch_size", "num_iters"):
            _check_count(name, getattr(options, name))
        return [Figures(records, self.percentiles) for records in asyncio.run(run())]

    @asynccontextmanager
    async def _opened(self, *, is_streamed: bool) -> AsyncIterator[_Opened]:
        options = self.target
        fields = options.extra_body or {}
        if options.url is not None:
            async with OpenAIClient(options.url, options.api_key) as client:
                name = options.model or (await client.model_names())[0]
                path = self.prompts.tokenizer_path
                tokenizer = None if path is None else load_tokenizer(path)
                yield _Opened(HttpTarget(client, name, is_streamed, options.ignore_eos, fields), tokenizer, name)
            return
        assert options.model is not None, "checked at the beginning"
        async with AsyncEngine(options.model, **self.engine_options) as engine:
            params = {"temperature": 0.0, "ignore_eos": options.ignore_eos, **fields}
            yield _Opened(EngineTarget(engine, is_streamed, params), engine.get_tokenizer(), options.model)

    def _requests(self, opened: _Opened, num_more: int, num: int | None = None) -> list[BenchRequest]:
        """The requests, and `num_more` for the warm-up before them."""
        options, tokenizer = self.prompts, opened.tokenizer
        output_tokens = Lengths.of("output_tokens", options.output_tokens)
        num = num or options.num_prompts
        if num is not None:
            _check_count("num_prompts", num)
        if options.dataset is not None:
            read = read_dataset(options.dataset, num, output_tokens, tokenizer, options.prompt_seed)
            return read[:num_more] + read
        shape = PromptShape(
            Lengths.of("prompt_tokens", options.prompt_tokens),
            output_tokens,
            options.prefix_tokens,
            options.num_prefixes,
        )
        count, is_chat = num_more + (num or _NUM_PROMPTS), self.target.chat
        return make_prompts(count, shape, tokenizer, as_text=False, is_chat=is_chat, seed=options.prompt_seed)

    async def _play(
        self, opened: _Opened, requests: Sequence[BenchRequest], times: Sequence[float] | None, concurrency: int | None
    ) -> list[Record]:
        if not requests:
            return []
        return await play(opened.target, requests, times, concurrency, self.target.request_timeout_s)


def _check_load(load: LoadOptions) -> None:
    for name in ("request_rate", "burstiness"):
        value = getattr(load, name)
        if value is not None and not value > 0:
            raise InvalidRequestError(f"{name}={value}: give a number above 0", field=name, value=value)
    if load.max_concurrency is not None:
        _check_count("max_concurrency", load.max_concurrency)


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise InvalidRequestError(f"{name}={value}: give at least 1", field=name, value=value)
