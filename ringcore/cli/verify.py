"""`ringcore verify`: a model here against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ringcore.cli.doctor import in_words
from ringcore.cli.options import engine_options, given, with_options

__all__ = ["make_verify"]


def make_verify() -> Callable[..., None]:
    """The command, with a flag for every engine option; the model is its argument."""
    return with_options(verify, _engine_flags())


def _engine_flags() -> list[Any]:
    return [option for option in engine_options() if option.name != "model"]


def verify(
    model: Annotated[str, typer.Argument(help="a model folder with safetensors, or a hub id")],
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object a line")] = False,
    reference_timeout_s: Annotated[float, typer.Option(min=1, help="seconds that transformers may take")] = 1800.0,
    **options: Any,
) -> None:
    """Checks that an engine computes what transformers computes, in float32 unless --dtype says otherwise.

    Greedy tokens and their log-probabilities are transformers'; they are the same alone, in a batch, from the prefix
    cache and with prompts in chunks; and seeded draws have the probabilities of the model (chi-squared). Tokens after a
    near tie of the best two logits are not compared. Exit code 1 if a check fails.

    Examples:

    \b
      ringcore verify ./smollm2-135m
      ringcore verify ./model --tensor-parallel-size 2 --dtype bfloat16 --json
    """
    import msgspec

    from ringcore.front_end.verification import verify as findings_of

    has_failed = False
    for finding in findings_of(model, given(options, _engine_flags()), reference_timeout_s):
        has_failed |= finding.level == "error"
        print(msgspec.json.encode(finding).decode() if as_json else "\n".join(in_words(finding)), flush=True)
    if has_failed:
        raise typer.Exit(1)
