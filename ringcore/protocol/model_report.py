"""What computes a model, as workers report it."""

from __future__ import annotations

import msgspec

__all__ = ["ModelReport"]


class ModelReport(msgspec.Struct, frozen=True):
    """What computes the model.

    impl: "native", a model class of this package, or "transformers", the model's own modules there, in which layers of
    this package replace those that compute the same: `fused` counts them, by kind ("layers", "attentions", "mlps",
    "norms", and "experts": the layers whose experts are computed by our function).
    """

    impl: str
    num_layers: int
    fused: dict[str, int] = {}
    not_fused: list[str] = []  # why the others are not, each reason once
