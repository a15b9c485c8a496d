"""`ringcore models`: what can be served, type by type."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer

__all__ = ["models"]

# It imports torch, and this process does not.
_PROGRAM = "ringcore.model_executor.models.transformers.known_types"


def models(
    types: Annotated[list[str] | None, typer.Argument(metavar="TYPE", help="a model_type; default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object a line")] = False,
) -> None:
    """Lists the types of causal LM that the installed transformers has, and of models whose text part is one: served by
    a native model, by transformers' own, or refused and why.

    Each is found out by building the model of its default configuration, without weights, which takes two minutes
    for all. A configuration that asks for more than the default may be refused when it is loaded.

    Examples:

    \b
      ringcore models
      ringcore models olmo2 gpt_oss mamba
      ringcore models --json > models.jsonl
    """
    command = [sys.executable, "-m", _PROGRAM, *(types or [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line.rstrip() if as_json else _row(json.loads(line)), flush=True)
    if program.returncode:
        raise typer.Exit(1)


def _row(found: dict[str, Any]) -> str:
    flags = {"is_part": "text only", "tensor_parallel": "tensor parallel", "gguf": "GGUF"}
    notes = [*found["attention"], *(text for flag, text in flags.items() if found[flag])]
    return f"{found['model_type']:<24} {found['model_impl']:<13} {found['reason'] or ', '.join(notes)}".rstrip()
