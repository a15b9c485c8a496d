"""The commands. Imports are lazy, down to what a command runs, so that `--help` starts fast."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ringcore.cli.logs import LogFormat, LogLevel, log_to_stderr

__all__ = ["make_app"]


def make_app() -> typer.Typer:
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

    from ringcore.cli.batch import make_batch
    from ringcore.cli.bench import make_bench
    from ringcore.cli.chat import make_chat
    from ringcore.cli.doctor import doctor
    from ringcore.cli.dump import dump
    from ringcore.cli.generate import make_generate
    from ringcore.cli.help import SectionedCommand
    from ringcore.cli.keys import keys
    from ringcore.cli.models import models
    from ringcore.cli.park import make_park
    from ringcore.cli.ps import ps
    from ringcore.cli.rpc import rpc
    from ringcore.cli.serve import make_serve
    from ringcore.cli.simulate import make_simulate
    from ringcore.cli.top.command import top
    from ringcore.cli.trace import trace
    from ringcore.cli.tune import make_tune
    from ringcore.cli.verify import make_verify
    from ringcore.cli.worker import worker

    command = partial(app.command, cls=SectionedCommand)
    command("generate", short_help="Complete prompts from the command line or a file.")(make_generate())
    command("batch", short_help="Answer a file of requests, resumable after any end.")(make_batch())
    command("chat", short_help="Talk to a model, or to a service behind a URL.")(make_chat())
    command("serve", short_help="Serve a model over HTTP, by OpenAI's interface.")(make_serve())
    command("simulate", short_help="Replay an arrival trace over engine replicas, without a GPU.")(make_simulate())
    app.add_typer(make_bench(), name="bench", short_help="Measure a model, or a service behind a URL.")
    command("models", short_help="List the models that can be served, and why others cannot.")(models)
    command("verify", short_help="Compare what a model generates here with transformers.")(make_verify())
    command("park", short_help="Start engines ahead, for programs that start later.")(make_park())
    command("tune", short_help="Search the fastest tiles of a model on this GPU.")(make_tune())
    command("ps", short_help="List the engines that this user runs on this host.")(ps)
    command("top", short_help="Show what a running engine does, live in the terminal.")(top)
    command("dump", short_help="Write a running engine's whole state as JSON.")(dump)
    command("rpc", short_help="Call a method of a running engine's workers.")(rpc)
    command("doctor", short_help="Check this machine, and say what mends each fault.")(doctor)
    command("trace", short_help="Record a timeline of a running engine's processes.")(trace)
    command("keys", short_help="Make the keys of an engine's admin endpoint.")(keys)
    command("worker", short_help="Run workers of an engine on another host.")(worker)
    return app


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
