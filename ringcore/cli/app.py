"""The commands. Imports are lazy, down to what a command runs, so that `--help` starts fast."""

from __future__ import annotations

import typer

__all__ = ["make_app"]


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="ringcore",
        help="Runs large language models on this machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # `main` reports our errors; a bug gets Python's own traceback
        rich_markup_mode=None,
    )

    from ringcore.cli.batch import make_batch
    from ringcore.cli.generate import make_generate
    from ringcore.cli.keys import keys
    from ringcore.cli.models import models
    from ringcore.cli.rpc import rpc
    from ringcore.cli.serve import make_serve
    from ringcore.cli.simulate import make_simulate

    app.command("generate", short_help="Complete prompts from the command line or a file.")(make_generate())
    app.command("batch", short_help="Answer a file of requests, resumable after any end.")(make_batch())
    app.command("serve", short_help="Serve a model over HTTP, by OpenAI's interface.")(make_serve())
    app.command("simulate", short_help="Replay an arrival trace over engine replicas, without a GPU.")(make_simulate())
    app.command("models", short_help="List the models that can be served, and why others cannot.")(models)
    app.command("rpc", short_help="Call a method of a running engine's workers.")(rpc)
    app.command("keys", short_help="Make the keys of an engine's admin endpoint.")(keys)
    return app
