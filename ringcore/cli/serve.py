"""`ringcore serve`: a model over HTTP, by OpenAI's interface."""

from __future__ import annotations

import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringcore.cli.logs import write_alike
from ringcore.cli.options import engine_options, given, none_or, service_options, with_options
from ringcore.errors import ConfigError
from ringcore.params.field_checks import MAX_TIMEOUT_S, is_timeout

if TYPE_CHECKING:
    from ringcore.serve import ServiceOptions
    from ringcore.serve.restart_signal import RestartSignal

__all__ = ["bind", "make_serve"]

_NEEDED = ("fastapi", "prometheus_client", "uvicorn", "httptools", "markdown_it", "pygments")
_END_S = 10.0  # after the drain: to send the last responses

_Keys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="RINGCORE_API_KEY",
        help="an API key that clients must send; a flag is visible to other users of this machine",
    ),
]
_AdminKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="RINGCORE_ADMIN_API_KEY",
        help="a key apart for admin calls (/sleep, /pause, weights, ...), which are refused where there is none",
    ),
]


def make_serve() -> Callable[..., None]:
    """The command, with a flag for every engine option and every limit of the service; the model is its argument."""
    return with_options(serve, [*service_options(), *_engine_flags()])


def _engine_flags() -> list[Any]:
    return [option for option in engine_options() if option.name != "model"]


def serve(
    model: Annotated[str, typer.Argument(help="a model folder, a .gguf file, or a hub id")],
    host: Annotated[str, typer.Option(help="the address to listen at; 0.0.0.0 for all of IPv4")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port to listen at; 0 picks a free one")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="the model name for clients; repeat it for more names")
    ] = None,
    api_key: _Keys = None,
    api_key_file: Annotated[Path | None, typer.Option(help="a file of such keys, one per line")] = None,
    admin_api_key: _AdminKeys = None,
    admin_api_key_file: Annotated[Path | None, typer.Option(help="a file of such keys, one per line")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="a name by which clients may call a service without keys, or '*' for any")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="an origin whose pages may call the service, or '*' for any")
    ] = None,
    tool_call_parser: Annotated[
        str, typer.Option(help="format of the model's calls: hermes, llama3_json, qwen3_coder, harmony, none, auto")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="format of the model's reasoning: qwen3, deepseek_r1, harmony, none, auto")
    ] = "auto",
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", min=1, help="engines behind the port, each on its own devices")
    ] = 1,
    routing: Annotated[
        str, typer.Option(help="which engine gets a request: prefix-affinity, least-loaded or round-robin")
    ] = "prefix-affinity",
    drain_s: Annotated[float, typer.Option(min=0, help="seconds that unfinished requests may take at shutdown")] = 30.0,
    shutdown_delay_s: Annotated[
        float, typer.Option(min=0, help="seconds at shutdown in which it still serves, and /health/ready says no")
    ] = 0.0,
    engine_restarts: Annotated[
        int | None,
        typer.Option(min=0, help="how often each dead engine is restarted; default: 0 for one, 8 for each of several"),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="an OTLP/HTTP URL that gets OpenTelemetry spans of every request")
    ] = None,
    access_log: Annotated[bool, typer.Option(help="log each request on stdout, but what polls")] = True,
    **options: Any,
) -> None:
    """Serves a model over HTTP: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics and others.

    Ctrl-C or SIGTERM ends it: unfinished requests have --drain-s seconds. A second Ctrl-C does not wait.
    Exit code 0 after that, 130 after a second Ctrl-C or one before it serves, 1 if all engines died.
    SIGUSR1 replaces the engines, one after the other, each once its requests have ended; while they start, afterwards.

    Examples:

    \b
      ringcore serve ./smollm2-135m
      ringcore serve ./model --port 9000 --served-model-name my-model --max-model-len 8192
      ringcore serve ./model --host 0.0.0.0 --api-key-file ./keys.txt --max-concurrent-requests 64
      ringcore serve ./model --data-parallel-size 4
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'ringcore[serve]'", option="serve")
    end_s = drain_s, shutdown_delay_s
    for name, seconds in zip(("drain_s", "shutdown_delay_s"), end_s, strict=True):
        if not is_timeout(seconds):
            remedy = f"give seconds, from 0 to {MAX_TIMEOUT_S:.0f}"
            raise ConfigError(f"{name}={seconds}: {remedy}", option=name, value=repr(seconds))
    import asyncio

    from ringcore.serve import ServiceOptions
    from ringcore.serve.otlp import spans_to
    from ringcore.serve.restart_signal import RestartSignal

    service = ServiceOptions(
        served_model_names=tuple(served_model_name or ()),
        api_keys=_keys("api_key_file", api_key, api_key_file),
        admin_api_keys=_keys("admin_api_key_file", admin_api_key, admin_api_key_file),
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        tool_call_parser=none_or(tool_call_parser),
        reasoning_parser=none_or(reasoning_parser),
        **given(options, service_options()),
    )
    listening = bind(host, port)  # before the model is loaded: a port in use fails at once
    service = _fitted(service, host, listening)
    if not service.api_keys and not _is_loopback(host):
        text = f"every client that reaches {host} may use the model; --api-key-file requires a key"
        print(f"ringcore: {text}", file=sys.stderr)
    engine = given(options, _engine_flags()) | {
        "data_parallel_size": data_parallel_size,
        "routing": routing,
        "engine_restarts": engine_restarts,
    }
    with RestartSignal(signal.SIGUSR1) as restarts, listening, spans_to(otlp_traces_endpoint) as provider:
        engine["tracer_provider"] = provider
        try:
            exit_code = asyncio.run(_serve(model, engine, service, listening, restarts, end_s, access_log))
        except KeyboardInterrupt:  # before it serves, or at the end of the shutdown
            exit_code = 130
    sys.exit(exit_code)


async def _serve(
    model: str,
    engine_options: dict[str, Any],
    options: ServiceOptions,
    listening: socket.socket,
    restarts: RestartSignal,
    end_s: tuple[float, float],
    access_log: bool,
) -> int:
    """Returns the exit code. end_s: of the drain, and of the delay before it."""
    from ringcore.front_end.replicas.replica_set import ReplicaSet
    from ringcore.serve import create_app
    from ringcore.serve.engine_server import EngineServer
    from ringcore.serve.server import http_config
    from ringcore.serve.throughput_log import throughput_logged

    host, port = listening.getsockname()[:2]

    class Server(EngineServer):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            try:
                await super().startup(sockets)
            except OSError as error:  # another process has started to listen here
                raise _cannot_listen(host, port, error) from error
            shown = f"[{host}]" if ":" in host else host
            print(f"ringcore: {model} at http://{shown}:{port}/v1", flush=True)

    async with ReplicaSet(model, **engine_options) as engine, restarts.restarting(engine), throughput_logged(engine):
        app = create_app(engine, options)
        if options.batch_dir is not None:
            app.state.batches.start()
        end = round(end_s[0] + _END_S)
        config = http_config(app, options, access_log=access_log, timeout_graceful_shutdown=end)
        write_alike("uvicorn", "uvicorn.access")
        server = Server(config, engine, *end_s, app.state.service.begin_ending)
        gc.collect()
        gc.freeze()  # objects of start-up live as long as the process: later collections, which hold all up, skip them
        await server.serve(sockets=[listening])
        return server.exit_code


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address; it listens once the server runs.

    Its protocol is explicit, not 0: asyncio sets TCP_NODELAY only then.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return made


def _fitted(options: ServiceOptions, host: str, listening: socket.socket) -> ServiceOptions:
    """The options with `max_connections` limited to the file descriptors, and `allowed_hosts` from the address."""
    from ringcore.serve.descriptors import fit_connections, raise_descriptor_limit
    from ringcore.serve.hosts import hosts_of_listener

    raise_descriptor_limit()
    fitting = fit_connections(options.max_connections)
    if fitting < options.max_connections:
        text = f"max_connections={options.max_connections} is cut to {fitting}, which RLIMIT_NOFILE (ulimit -n) allows"
        print(f"ringcore: {text}", file=sys.stderr)
    hosts = hosts_of_listener(host, listening.getsockname()[0], options.allowed_hosts, has_keys=bool(options.api_keys))
    return replace(options, max_connections=fitting, allowed_hosts=hosts)


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"port={port}: cannot listen at {host}: {error.strerror}; give another --port or --host",
        option="port",
        value=port,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(option: str, given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """The keys of the command line, and those of a file. option: which gives the file."""
    return (*(given or ()), *([] if file is None else _read_keys(option, file)))


def _read_keys(option: str, file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}={str(file)!r}: cannot be read: {error}", option=option, value=str(file)) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(
            f"{option}={str(file)!r}: it has no key; write one per line",
            option=option,
            value=str(file),
        )
    return keys
