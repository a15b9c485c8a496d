"""How a command shows its options, and explains one that it has not: in the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING
from typing import Any

from typer.core import TyperCommand

from ringcore.errors import UnknownOptionError

__all__ = ["SectionedCommand", "flag_help"]

_TYPE = re.compile(r"<(?:list\[)?(\w+)(?:\]| range)>")  # as typer writes a type: <list[str]>, <int range>
_NAMED = re.compile(r"\b([a-z]+(?:_[a-z]+)+)\b(?![.\w])(?:=(\w+))?")  # a name of several words, with its value
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class SectionedCommand(TyperCommand):
    """The options of a heading (typer calls it `rich_help_panel`) together, those without one first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `UnknownOptionError` for a flag of vLLM's command line: what it is here."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of the parser, whose types typer does not export
            match error:
                case object(option_name=str(flag)):
                    self._explain(flag)
            raise

    def _explain(self, flag: str) -> None:
        from ringcore.cli.vllm_flags import what_it_is_here

        here = what_it_is_here(flag)
        if here is not None:
            names = {param.name for param in self.params}
            here = _NAMED.sub(lambda one: _flag(one[1], one[2]) if one[1] in names else one[0], here)
            raise UnknownOptionError(f"unknown option {flag}, which is vLLM's: {here}", option=flag, nearest=None)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append((_TYPE.sub(r"<\1>", record[0]), record[1]))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def flag_help(name: str, doc: str, default: Any, names: Collection[str]) -> str:
    """The help of the flag for a field, whose `doc` is written for Python.

    There None is what is not given here, and False what a flag with "no-" is. default: of the field, which may be
    MISSING. names: of fields that have flags.
    """
    doc = re.sub(r"`(\w+)`", lambda one: _flag(one[1]) if one[1] in names else one[1], doc.removesuffix("."))
    doc = _NAMED.sub(lambda one: _flag(one[1], one[2]) if one[1] in names else one[0], doc)
    if default is MISSING or default is None or default == "":
        doc = re.sub(r"\bNone (?:means|for)\b", "default:", doc)
        return re.sub(r"\bNone(?= (?:keeps|measures)\b)", "the default", doc)
    doc = re.sub(r"; None means [^;]*", "", doc)
    doc = re.sub(r"^False\b", _flag(name, "False"), doc)
    return f"{doc} (default: {_shown(name, default)})"


def _flag(name: str, value: str | None = None) -> str:
    flag = name.replace("_", "-")
    if value in ("True", "False"):
        return f"--{flag}" if value == "True" else f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


def _shown(name: str, default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if name.endswith("_bytes"):
        whole = (f"{default // size}{unit}" for unit, size in _UNITS if default and default % size == 0)
        return next(whole, str(default))
    return f"{default:g}" if isinstance(default, float) else str(default)
