"""`ringcore bench`: latency, throughput and service load of a model, in this process or behind a URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ringcore.bench.options import LatencyOptions, LoadOptions, PromptOptions, ReportOptions, TargetOptions
from ringcore.cli.help import SectionedCommand
from ringcore.cli.options import dataclass_options, engine_options, given, with_options
from ringcore.errors import ConfigError

if TYPE_CHECKING:
    from ringcore.bench.figures import Figures
    from ringcore.bench.run import Bench

__all__ = ["make_bench"]

_COMMON = (TargetOptions, PromptOptions, ReportOptions)


def make_bench() -> typer.Typer:
    """The commands, each with a flag for every option of the benchmark and of the engine."""
    text = "Measures a model in this process, or a service behind a URL: its latency, throughput, or both under load."
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=text)
    for command, kinds, short in (
        (latency, (LatencyOptions,), "Time a batch of requests, over and over."),
        (throughput, (), "Time many requests that all come at once."),
        (serve, (LoadOptions,), "Put a service's load on it: TTFT, ITL, TPOT, goodput."),
    ):
        app.command(command.__name__, cls=SectionedCommand, short_help=short)(_with_flags(command, *kinds))
    return app


def _with_flags(command: Callable[..., None], *kinds: type[Any]) -> Callable[..., None]:
    own = [parameter for kind in (*_COMMON, *kinds) for parameter in dataclass_options(kind)]
    return with_options(command, [*own, *_engine_flags()])


def _engine_flags() -> list[Any]:
    return [option for option in engine_options() if option.name != "model"]


def serve(**options: Any) -> None:
    """Sends requests at random times (--request-rate), or so many at once (--max-concurrency), and streams the answers.

    Latencies count from the moment at which a request was due, and once more from its sending. TTFT: time to first
    token. ITL: between pieces of a stream. TPOT: per token after the first. E2EL: to the end.

    Examples:

    \b
      ringcore bench serve --model ./model --request-rate 4 --num-prompts 200
      ringcore bench serve --url http://127.0.0.1:8000 --request-rate 8 --goodput ttft:500 --goodput tpot:50
      ringcore bench serve --url http://127.0.0.1:8000 --max-concurrency 64 --dataset requests.jsonl --chart load.png
    """
    bench = _bench(options)
    figures = bench.serve(_read(LoadOptions, options))
    _report(bench, figures, "serve", figures.table(), figures.to_dict())


def throughput(**options: Any) -> None:
    """Sends all requests at once and waits for whole answers: requests/s and tokens/s.

    Examples:

    \b
      ringcore bench throughput --model ./model --num-prompts 500 --prompt-tokens 512 --output-tokens 128
      ringcore bench throughput --url http://127.0.0.1:8000 --num-prompts 500 --prefix-tokens 256
    """
    bench = _bench(options)
    figures = bench.throughput()
    values = figures.to_dict()
    named = {
        "elapsed_time": values["duration"],
        "num_requests": values["completed"],
        "total_num_tokens": values["total_input_tokens"] + values["total_output_tokens"],
        "requests_per_second": values["request_throughput"],
        "tokens_per_second": values["total_token_throughput"],
    }
    _report(bench, figures, "throughput", figures.table(), named | values)


def latency(**options: Any) -> None:
    """Sends a batch of requests at once and waits for all of them, many times: the seconds of a batch.

    Examples:

    \b
      ringcore bench latency --model ./model --prompt-tokens 32 --output-tokens 128 --batch-size 8
      ringcore bench latency --url http://127.0.0.1:8000 --batch-size 1 --num-iters 100 --json latency.json
    """
    from ringcore.bench.figures import Figures, batch_latencies, batch_table

    bench = _bench(options)
    batches = bench.latency(_read(LatencyOptions, options))
    values = batch_latencies(batches, bench.percentiles)
    every = Figures([record for batch in batches for record in batch.records], bench.percentiles)
    _report(bench, every, "latency", batch_table(values), values)


def _bench(options: dict[str, Any]) -> Bench:
    from ringcore.bench.run import Bench
    from ringcore.testing.simulation_chart import check_can_draw

    target, report = _read(TargetOptions, options), _read(ReportOptions, options)
    engine = given(options, _engine_flags())
    if target.url is not None and engine:
        name = next(iter(engine))
        raise ConfigError(
            f"{name}: an option of an engine in this process; leave it out, or --url", option=name, value=engine[name]
        )
    if report.chart is not None:
        check_can_draw("chart", "bench")
    for option, file in (("json", report.json), ("chart", report.chart)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{option}={str(file)!r}: there is no such folder; make it", option=option)
    return Bench(target, _read(PromptOptions, options), report, engine)


def _read(kind: type[Any], options: dict[str, Any]) -> Any:
    return kind(**given(options, dataclass_options(kind)))


def _report(bench: Bench, figures: Figures, name: str, lines: list[str], values: dict[str, Any]) -> None:
    """Prints the table, and writes what was asked for. Exit code 1 if no request succeeded."""
    for line in lines:
        print(line)
    for kind, message in {failure.kind: failure.message for failure in figures.failures}.items():
        print(f"ringcore: {kind}: {message}", file=sys.stderr)
    if bench.report.json is not None:
        _write_json(bench.report.json, _asked(bench, name) | values | figures.samples())
    if bench.report.chart is not None:
        from ringcore.bench.chart import draw_chart

        draw_chart(figures, bench.report.chart, f"bench {name}: {bench.target.url or bench.target.model}")
    if not figures.answers:
        raise typer.Exit(1)


def _asked(bench: Bench, name: str) -> dict[str, Any]:
    """What the figures are of; the key is left out."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    asked: dict[str, Any] = {"benchmark": name, "date": date}
    for part in (bench.target, bench.prompts):
        asked |= {f.name: getattr(part, f.name) for f in fields(part) if f.name != "api_key"}
    return asked | {"engine_options": dict(bench.engine_options)}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(value, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json={str(file)!r}: cannot be written: {error}", option="json", value=str(file)) from error
