"""Models whose weights have a place that stays, and all tensors that one holds, wherever they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import MAX_LEN

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model


def poisoned(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def placed(
    folder: Path | str, tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the model, its tensors by name)."""
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES)
    model = build_model(spec, tp or SingleRank(), dtype, MAX_LEN)
    with pending_weights(model.weights(), files, 0, torch.device("cpu"), poisoned) as pending:
        final = pending.final
        model.bind(pending, updatable=True)
    return model, dict(final)


def tensors_of(thing: Any) -> dict[str, torch.Tensor]:
    """Every tensor that can be reached from a model, by the way there: attributes, items, closures, bound arguments."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(way: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[way] = value
        elif id(value) not in seen and _holds_more(value):
            seen.add(id(value))
            for name, inner in _inside(value):
                visit(f"{way}.{name}", inner)

    visit("model", thing)
    return found


def _holds_more(value: Any) -> bool:
    is_ours = type(value).__module__.startswith("ringcore.")
    return is_ours or isinstance(value, list | tuple | dict | functools.partial | types.FunctionType | types.MethodType)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case list() | tuple():
            yield from ((str(index), item) for index, item in enumerate(value))
        case dict():
            yield from ((str(key), item) for key, item in value.items())
        case functools.partial():
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        case types.FunctionType():
            names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((name, cell.cell_contents) for name, cell in names)
        case types.MethodType():
            yield "self", value.__self__
        case _:
            slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
            yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
            yield from getattr(value, "__dict__", {}).items()
