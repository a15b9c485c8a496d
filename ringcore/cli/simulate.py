"""`ringcore simulate`: an arrival trace over engine replicas, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ringcore.cli.options import engine_options, given, with_options
from ringcore.config import ParallelConfig
from ringcore.errors import ConfigError, InvalidRequestError

__all__ = ["make_simulate"]

# Engine options of real workers, or that a simulation sets itself.
_NOT_SIMULATED = {"tokenizer", "load_format", "steps_in_flight", "device", "attention_backend"}


def make_simulate() -> Callable[..., None]:
    """The command, with flags for the engine options that affect scheduling."""
    kept = [p for p in engine_options() if p.name not in _excluded()]
    return with_options(simulate, kept)


def _excluded() -> set[str]:
    return _NOT_SIMULATED | (set(ParallelConfig.__dataclass_fields__) - {"tensor_parallel_size"})


def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.jsonl", help="one request per line: time, prompt_tokens, output_tokens")
    ],
    gpus: Annotated[int, typer.Option(help="devices in all; a replica has --tensor-parallel-size of them")],
    routing: Annotated[
        str, typer.Option(help="which replica gets a request: round-robin, least-loaded or prefix-affinity")
    ] = "round-robin",
    load_bound: Annotated[
        float, typer.Option(help="prefix-affinity: the most requests of a replica, over the mean; 0 is no bound")
    ] = 1.25,
    hardware: Annotated[str, typer.Option(help="the kind of device: h200, h100, a100 or l40s")] = "h200",
    measurements: Annotated[
        Path | None, typer.Option(help="measured steps (.jsonl) to fit the costs to, instead of the device's numbers")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="processes of the simulation, for routing that ignores loads; default: one per core"),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="draw the result into this file; needs ringcore[simulate]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers into this file as JSON")] = None,
    poisson: Annotated[float | None, typer.Option(help="generate the trace first, of so many requests/s")] = None,
    requests: Annotated[int, typer.Option(help="generated trace: how many requests")] = 10_000,
    prompt_tokens: Annotated[int, typer.Option(help="generated trace: the mean length of prompts, in tokens")] = 500,
    output_tokens: Annotated[int, typer.Option(help="generated trace: the mean length of answers, in tokens")] = 200,
    prefixes: Annotated[int, typer.Option(help="generated trace: how many beginnings are shared")] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="generated trace: the length of each, in tokens")] = 0,
    **options: Any,
) -> None:
    """Replays requests over engine replicas in virtual time: a step takes its modelled cost. Prints the results.

    The schedulers and prefix caches are the real ones; no model is loaded and no device is needed. --model is a folder
    with a config.json, or that file.

    Examples:

    \b
      ringcore simulate day.jsonl --gpus 8 --model ./llama-8b/config.json
      ringcore simulate day.jsonl --gpus 8 --model ./llama-70b --tensor-parallel-size 4 --routing least-loaded
      ringcore simulate day.jsonl --gpus 64 --model ./llama-8b --routing prefix-affinity --png day.png --json day.json
      ringcore simulate new.jsonl --poisson 12 --requests 50000 --gpus 4 --model ./llama-8b

    A line of a trace: {"time": 0.5, "prompt_tokens": 512, "output_tokens": 200}, and if wanted "prefix_id": "a" with
    "prefix_tokens": 300 (requests of one id begin alike), "priority": 1.
    """
    from ringcore.config import EngineConfig
    from ringcore.testing import Simulator, StepCost, read_measurements, read_trace
    from ringcore.testing.simulation_chart import check_can_draw, draw_png

    if png is not None:
        check_can_draw()
    for option, file in (("png", png), ("json", json_file)):
        _check_folder(option, file)
    own = given(options, [p for p in engine_options() if p.name in options])
    config = EngineConfig.from_options(**own | {"model": _model_folder(own["model"]), "load_format": "dummy"})
    if poisson is not None:
        _make_trace(trace, requests, poisson, prompt_tokens, output_tokens, prefixes, prefix_tokens)
    simulator = Simulator(
        config,
        _num_replicas(gpus, config.parallel.tensor_parallel_size),
        routing=routing,
        load_bound=load_bound or None,
        hardware=hardware,
        cost=None if measurements is None else StepCost.fit(read_measurements(measurements)),
        num_processes=processes,
    )
    result = simulator.run(read_trace(trace))
    for name, value in result.table():
        print(f"{name:<34} {value}")
    for reason, message in result.refusals.items():
        print(f"first of {reason}: {message}")
    if json_file is not None:
        _write_json(json_file, result.to_dict())
    if png is not None:
        draw_png(result, png, title=f"{trace.name}: {simulator.num_replicas} replicas, {routing}")


def _model_folder(model: str) -> str:
    """The folder of a config.json; any other path unchanged."""
    return os.path.dirname(os.path.abspath(model)) if os.path.basename(model) == "config.json" else model


def _num_replicas(gpus: int, ranks: int) -> int:
    if gpus < ranks or gpus % ranks:
        raise ConfigError(
            f"gpus={gpus}: a replica has tensor_parallel_size={ranks} of them; give a multiple of that",
            option="gpus",
            value=gpus,
        )
    return gpus // ranks


def _check_folder(option: str, file: Path | None) -> None:
    """Fails before a long simulation rather than after it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"{option}={str(file)!r}: there is no such folder; make it", option=option, value=str(file))


def _make_trace(file: Path, requests: int, rate: float, prompt: int, output: int, prefixes: int, shared: int) -> None:
    from ringcore.testing import poisson_trace, write_trace

    if file.exists():
        raise InvalidRequestError(
            f"trace {str(file)!r}: exists, and --poisson would make it; give another name, or leave out --poisson",
            field="trace",
            value=str(file),
        )
    made = poisson_trace(
        requests, rate, prompt_tokens=prompt, output_tokens=output, num_prefixes=prefixes, prefix_tokens=shared
    )
    write_trace(made, file)


def _write_json(file: Path, summary: dict[str, Any]) -> None:
    import json

    try:
        file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json={str(file)!r}: cannot be written: {error}", option="json", value=str(file)) from error
