"""Why a model of transformers cannot run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringcore.checkpoint import TransformersSpec
from ringcore.errors import ModelLoadError
from ringcore.model_executor.models.transformers.needs import Need

__all__ = ["CountsPositions", "KeepsArguments", "Refused", "in_one_line", "refusals_of"]

_MAX_REASON = 160  # characters


class Refused(Exception):
    """The reason, in one line, and what the model would need."""

    def __init__(self, reason: str, need: Need = Need.OTHER) -> None:
        super().__init__(reason)
        self.need = need


class KeepsArguments(Refused):
    """The model does not hand its keyword arguments down to its attention."""


class CountsPositions(Refused):
    """The model counts the positions of its tokens, though it is given them."""


def in_one_line(error: Exception) -> str:
    """Of an error that transformers or a model raises."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"


@contextmanager
def refusals_of(spec: TransformersSpec) -> Iterator[None]:
    """Raises a refusal as the `ModelLoadError` of this model."""
    try:
        yield
    except Refused as refusal:
        raise ModelLoadError(
            f"{spec.model_type}: {refusal}; this model cannot be served yet",
            architecture=spec.architecture,
            reason=str(refusal),
            need=refusal.need.name,
        ) from refusal
