"""Command-line options made from dataclass fields, so that each option has one name, one default, one description."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import typer

from ringcore.batch.options import BatchOptions
from ringcore.cli.help import flag_help
from ringcore.cli.sizes import SIZE, size_in_bytes
from ringcore.config import EngineConfig
from ringcore.errors import unknown_option
from ringcore.params.sampling_params import SamplingParams
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.serve.options import ServiceOptions

__all__ = [
    "Progress",
    "batch_options",
    "dataclass_options",
    "engine_options",
    "given",
    "none_or",
    "sampling_options",
    "service_options",
    "with_options",
]

Progress = Annotated[bool | None, typer.Option(help="a progress bar on stderr; default: where that is a terminal")]

# `--seed` is the engine's; a request's own seed is the only option with another flag name.
_SAMPLING_NAMES = {"seed": "request_seed"}
_NO_FLAGS = ("output_kind",)  # for streams alone
_SHORT = {  # as vLLM has them
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "expert_parallel": "-ep",
    "quantization": "-q",
}
_VARIABLES = {"start_from": "RINGCORE_START_FROM"}  # environment variables of flags that were not given
# Headings of the help, by the part of `EngineConfig`.
_HEADINGS = {
    "model": "Engine: the model",
    "cache": "Engine: KV cache",
    "scheduler": "Engine: scheduling",
    "parallel": "Engine: processes, hosts and operators",
    "device": "Engine: the device",
}


@cache
def engine_options() -> tuple[inspect.Parameter, ...]:
    """One parameter for each of `EngineConfig.options()`, under its own name."""
    types: dict[str, Any] = {}
    headings: dict[str, str] = {}
    for name, part in EngineConfig.PARTS.items():
        types |= typing.get_type_hints(part)
        headings |= dict.fromkeys((field.name for field in fields(part)), _HEADINGS[name])
    return tuple(
        _parameter(name, types[name], option, option.metadata["option"], headings[name], required=name == "model")
        for name, option in EngineConfig.options().items()
    )


def batch_options() -> list[inspect.Parameter]:
    """One parameter for each described field of `BatchOptions`."""
    types = typing.get_type_hints(BatchOptions)
    return [_parameter(f.name, types[f.name], f, f.metadata["option"]) for f in BatchOptions.described()]


def dataclass_options(kind: type[Any]) -> list[inspect.Parameter]:
    """One parameter for each field, whose metadata has its description."""
    types = typing.get_type_hints(kind)
    return [_parameter(f.name, types[f.name], f, f.metadata["option"]) for f in fields(kind)]


def service_options() -> list[inspect.Parameter]:
    """One parameter for each bound of `ServiceOptions`."""
    types = typing.get_type_hints(ServiceOptions)
    heading = "Requests, batches and connections"
    return [_parameter(f.name, types[f.name], f, f.metadata["option"], heading) for f in ServiceOptions.bounds()]


def sampling_options() -> list[inspect.Parameter]:
    """One parameter for each field of `SamplingParams`, described by the lines of its docstring."""
    types, docs = typing.get_type_hints(SamplingParams), _field_docs(SamplingParams.__doc__ or "")
    return [
        _parameter(_SAMPLING_NAMES.get(f.name, f.name), types[f.name], f, docs.get(f.name, ""), "Sampling")
        for f in fields(SamplingParams)
        if f.name not in _NO_FLAGS
    ]


def given(values: dict[str, Any], parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """The options of `parameters` that the command line set, by the names of their fields.

    Options that were not given are left out, so that the dataclass's default applies.
    """
    names = {shown: name for name, shown in _SAMPLING_NAMES.items()}
    return {names.get(p.name, p.name): values[p.name] for p in parameters if values[p.name] not in (None, [])}


def none_or(name: str) -> str | None:
    """A flag of text whose "none" is None."""
    return None if name in ("none", "None") else name


def with_options(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Wraps `command(**options)` in a function whose signature, which typer reads, also lists `parameters`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    every = [*own, *parameters]

    def run(**options: Any) -> None:
        command(**options)

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in every}
    return run


def _parameter(
    name: str, kind: Any, option: Field[Any], doc: str, heading: str | None = None, *, required: bool = False
) -> inspect.Parameter:
    """A keyword whose default is None (not given); the help names the field's own default. heading: of the help."""
    plain = _plain_type(kind)
    doc = flag_help(option.name, doc, MISSING if required else option.default, _named_fields())
    flag = f"--{name.replace('_', '-')}"
    flags = f"{flag}/--no-{flag[2:]}" if plain is bool else flag
    reading = _reading(name, kind)
    if typing.get_origin(plain) is list and "repeat it" not in doc:
        doc = f"{doc}; repeat it for more"
    names = [flags, *([_SHORT[name]] if name in _SHORT else [])]
    reading["envvar"] = _VARIABLES.get(name)
    flag_option = typer.Option(*names, help=doc, show_default=False, rich_help_panel=heading, **reading)
    annotation = Annotated[plain if required else plain | None, flag_option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=annotation,
        default=inspect.Parameter.empty if required else None,
    )


@cache
def _named_fields() -> frozenset[str]:
    return frozenset([*EngineConfig.options(), *(f.name for f in fields(SamplingParams))])


def _plain_type(kind: Any) -> Any:
    """The type of one flag: `int | None` is int; `list[str] | str | None` is a repeatable flag."""
    if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [k for k in typing.get_args(kind) if k is not NoneType]
        return next((k for k in kinds if typing.get_origin(k) is list), kinds[0])
    return kind


def _reading(name: str, kind: Any) -> dict[str, Any]:
    """The parser of a flag that takes a size, a JSON object, or a number or one of a few words, such as
    `int | Literal["auto"]`."""
    plain = _plain_type(kind)
    if name.endswith("_bytes") and plain is int:
        return {"parser": size_in_bytes, "metavar": SIZE}
    if plain is StructuredOutputsParams:
        return {"parser": _structured_outputs, "metavar": "<json>"}
    if typing.get_origin(plain) is dict:
        keys = typing.get_args(plain)[0]
        return {"parser": partial(_json_object, keys=keys), "metavar": "<json>"}
    words = [word for k in typing.get_args(kind) if typing.get_origin(k) is Literal for word in typing.get_args(k)]
    return {"parser": _number_or_word, "metavar": f"<{'|'.join(['int', *words])}>"} if words else {}


def _number_or_word(text: str) -> int | str:
    """An int, or the word itself, which the config validates."""
    try:
        return int(text)
    except ValueError:
        return text


def _json_object(text: str, keys: type = str) -> dict[Any, Any]:
    """A JSON object whose string keys are converted to `keys`."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return {keys(key): item for key, item in value.items()}
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"give a JSON object with {keys.__name__} keys: {error}") from error


def _structured_outputs(text: str) -> StructuredOutputsParams:
    """One of its fields in a JSON object, as `{"regex": "[0-9]+"}`."""
    value, names = _json_object(text), [f.name for f in fields(StructuredOutputsParams)]
    for name in value:
        if name not in names:
            raise unknown_option(name, names, "structured output")
    return StructuredOutputsParams(**value)


def _field_docs(doc: str) -> dict[str, str]:
    """The paragraphs "name: text" of a docstring, whose further lines are indented."""
    found = re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", doc, re.M)
    return {name: " ".join(text.split()) for name, text in found}
