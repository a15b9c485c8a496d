"""The commands. Imports are lazy, down to what a command runs, so that `--help` starts fast."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from ringcore.cli.help import SectionedCommand
from ringcore.cli.logs import LogFormat, LogLevel, log_to_stderr

__all__ = ["make_app"]

# By name: the module of this package and what is in it, the command or what makes it, and its line in the list.
_COMMANDS = {
    "generate": ("generate:make_generate", "Complete prompts from the command line or a file."),
    "batch": ("batch:make_batch", "Answer a file of requests, resumable after any end."),
    "chat": ("chat:make_chat", "Talk to a model, or to a service behind a URL."),
    "serve": ("serve:make_serve", "Serve a model over HTTP, by OpenAI's interface."),
    "simulate": ("simulate:make_simulate", "Replay an arrival trace over engine replicas, without a GPU."),
    "models": ("models:models", "List the models that can be served, and why others cannot."),
    "verify": ("verify:make_verify", "Compare what a model generates here with transformers."),
    "park": ("park:make_park", "Start engines ahead, for programs that start later."),
    "tune": ("tune:make_tune", "Search the fastest tiles of a model on this GPU."),
    "ps": ("ps:ps", "List the engines that this user runs on this host."),
    "top": ("top.command:top", "Show what a running engine does, live in the terminal."),
    "dump": ("dump:dump", "Write a running engine's whole state as JSON."),
    "rpc": ("rpc:rpc", "Call a method of a running engine's workers."),
    "doctor": ("doctor:doctor", "Check this machine, and say what mends each fault."),
    "trace": ("trace:trace", "Record a timeline of a running engine's processes."),
    "keys": ("keys:keys", "Make the keys of an engine's admin endpoint."),
    "worker": ("worker:worker", "Run workers of an engine on another host."),
    "bench": ("bench:make_bench", "Measure a model, or a service behind a URL."),
}


def make_app(args: Sequence[str] = ()) -> typer.Typer:
    """args: the command line, if it is known. A command that it cannot mean, since its name is no word of it, has its
    line in the list alone: to describe the flags of all takes longer than most commands do."""
    app = typer.Typer(
        name="ringcore",
        help="Runs large language models on this machine.",
        no_args_is_help=True,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},  # of every command
        pretty_exceptions_enable=False,  # `main` reports our errors; a bug gets Python's own traceback
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name, (place, line) in _COMMANDS.items():
        command = _load(place) if not args or name in args else _not_meant
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=line)
        else:
            app.command(name, cls=SectionedCommand, short_help=line)(command)
    return app


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"ringcore.cli.{module}"), attribute)
    return found() if attribute.startswith("make_") else found


def _not_meant() -> None:
    raise AssertionError("a command that is no word of the command line")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from ringcore.cli.version import version_line

        print(version_line())
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version, and exit")
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="what all processes log to stderr, and worse; default: info (serve, tune), else warning"),
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="lines of text, or a JSON object a line")] = LogFormat.text,
) -> None:
    """Runs large language models on this machine. The options of logs may follow the command too."""
    default = LogLevel.info if context.invoked_subcommand in ("serve", "tune") else LogLevel.warning
    context.call_on_close(log_to_stderr(log_level or default, log_format))
