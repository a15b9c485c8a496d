"""`ringcore models`: what can be served, type by type."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer

from ringcore.checkpoint.quantization import GGUF_BLOCKS
from ringcore.checkpoint.quantization.reader import quantization_methods
from ringcore.config.options import QUANTIZATIONS

__all__ = ["formats_in_words", "in_words", "models"]

# It imports torch, and this process does not.
_PROGRAM = "ringcore.model_executor.models.lean_programs"


def models(
    types: Annotated[list[str] | None, typer.Argument(metavar="TYPE", help="a model_type; default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object a line")] = False,
) -> None:
    """Lists the types of causal LM that the installed transformers has, and of models whose text part is one: served by
    a native model, by transformers' own, or refused and why. The last lines are the formats of quantized weights.

    Each is found out by building the model of its default configuration, without weights, which takes a minute for
    all. A configuration that asks for more than the default may be refused when it is loaded.

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
            print(line.rstrip() if as_json else in_words(json.loads(line)), flush=True)
    if program.returncode:
        raise typer.Exit(1)
    if not as_json:
        print(formats_in_words())


def formats_in_words() -> str:
    """The formats of quantized weights, a line for each way to have them."""
    return (
        f"\nquantized checkpoints, by quant_method: {', '.join(quantization_methods())}\n"
        f"16-bit checkpoints, by the option quantization: {', '.join(QUANTIZATIONS)}\n"
        f"GGUF files, packed on a CPU by gguf_weights: {', '.join(GGUF_BLOCKS)}; others are expanded"
    )


def in_words(found: dict[str, Any]) -> str:
    """A line about a type, from its row of `ringcore models --json`."""
    notes = _refusal(found) if found["model_impl"] == "refused" else ", ".join(_notes(found))
    return f"{found['model_type']:<24} {found['model_impl']:<13} {notes}".rstrip()


def _refusal(found: dict[str, Any]) -> str:
    return f"{found['reason']}; needs {found['needs']}{' (planned)' if found['is_planned'] else ''}"


def _notes(found: dict[str, Any]) -> list[str]:
    notes = [*(["text only"] if found["is_part"] else []), *found["attention"]]
    if found["two_ranks_refused"]:
        notes.append(f"one rank alone: {found['two_ranks_refused']}")
    elif found["tensor_parallel"]:
        share = found["share_of_two"]
        notes.append("tensor parallel" if share is None else f"tensor parallel (each of two ranks {share:.0%})")
    if found["kept_from_graphs"]:
        notes.append(f"no CUDA graphs: {found['kept_from_graphs']}")
    return notes + ([f"fused: {found['fused']}"] if found["fused"] else []) + (["GGUF"] if found["gguf"] else [])
