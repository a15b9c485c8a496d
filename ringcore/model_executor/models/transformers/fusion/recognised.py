"""What was recognised of a model, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringcore.model_executor.models.transformers.fusion.plan import AnyAttentionPlan, LayerPlan, MLPPlan, NormPlan

__all__ = ["Recognised", "RotarySource"]


@dataclass(frozen=True, slots=True)
class RotarySource:
    """A call of the module that computes cosines and sines. Its tensors are replaced: floats by rows of the wanted
    length, integers by positions."""

    path: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Recognised:
    """Paths are names in the body. plans: by path of the layer, of those that are recognised as a whole; the next three
    by path of the module, or of the first one of several that are an MLP together."""

    layers: tuple[str, ...] = ()
    plans: Mapping[str, LayerPlan] = field(default_factory=dict)
    attentions: Mapping[str, AnyAttentionPlan] = field(default_factory=dict)
    mlps: Mapping[str, MLPPlan] = field(default_factory=dict)
    norms: Mapping[str, NormPlan] = field(default_factory=dict)
    final_norm: NormPlan | None = None  # of the last layer's output, and of nothing else
    reasons: Mapping[str, str] = field(default_factory=dict)  # of what is not recognised
    num_results: Mapping[str, int | None] = field(default_factory=dict)  # of the tuple that it returns; None: a tensor
    sources: tuple[RotarySource, ...] = ()
    linears: frozenset[str] = frozenset()  # whose weight nothing but their own product reads
    continues: frozenset[str] = frozenset()  # layers whose input is the output of the layer before, and nothing between
