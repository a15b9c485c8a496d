"""Reads which layers have sliding-window attention, from config.json or a GGUF header."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.checkpoint.family import Family
from ringcore.checkpoint.metadata import Metadata

__all__ = ["FULL", "SLIDING", "full_every", "read_gguf_windows", "read_windows", "sliding_later_layers"]

FULL, SLIDING = "full_attention", "sliding_attention"  # the kinds of layers, in the words of `layer_types`
_FIRST_WINDOW_LAYER = 28  # transformers' default of max_window_layers


def read_windows(config: Metadata, architecture: str, family: Family, num_layers: int) -> dict[int, int]:
    """`ModelSpec.sliding_windows` of config.json. Raises `ModelLoadError` for what the model class does not
    support, for a window below 1, and for layer types that are unknown or do not match the number of layers.
    """
    given = _layer_types(config, num_layers)
    if family.layer_kinds is not None:
        return _windows(family.layer_kinds(config, num_layers, given), config, "sliding_window")
    if SLIDING in (given or _later_layers(config, num_layers)):
        key = "layer_types" if given else "use_sliding_window"
        raise config.error(key, f"asks for {SLIDING!r} layers, which {architecture} does not have")
    return {}


def read_gguf_windows(meta: Metadata, name: str, num_layers: int, default_period: int) -> dict[int, int]:
    """`ModelSpec.sliding_windows` of a GGUF file, whose pattern is a period, or a flag per layer that is true
    for a sliding window. Raises `ModelLoadError` as `read_windows` does.
    """
    key = f"{name}.attention.sliding_window_pattern"
    pattern = meta.get(key)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
            raise meta.error(key, f"is {pattern!r}, true or false for each of {num_layers} layers is needed")
        kinds = [SLIDING if slides else FULL for slides in pattern]
    else:
        kinds = full_every(meta.integer(key, default_period), num_layers)
    return _windows(kinds, meta, f"{name}.attention.sliding_window")


def sliding_later_layers(config: Metadata, num_layers: int, given: list[str] | None) -> list[str]:
    """A `Family.layer_kinds`: sliding windows from layer `max_window_layers` on, where `use_sliding_window`."""
    kinds = given or _later_layers(config, num_layers)
    if SLIDING in kinds and not config.flag("use_sliding_window", False):
        raise config.error("layer_types", "has 'sliding_attention' layers, but use_sliding_window is not true")
    return kinds


def full_every(period: int, num_layers: int) -> list[str]:
    """Full attention in the last of every `period` layers."""
    return [FULL if layer % period == period - 1 else SLIDING for layer in range(num_layers)]


def _windows(kinds: Sequence[str], source: Metadata, key: str) -> dict[int, int]:
    if SLIDING not in kinds:
        return {}
    window = source.integer(key)
    return {layer: window for layer, kind in enumerate(kinds) if kind == SLIDING}


def _later_layers(config: Metadata, num_layers: int) -> list[str]:
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return [FULL] * num_layers
    first = config.integer("max_window_layers", _FIRST_WINDOW_LAYER, low=0)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def _layer_types(config: Metadata, num_layers: int) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise config.error("layer_types", f"is {kinds!r}, a list is needed")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise config.error("layer_types", f"has {kind!r} layers; known: {FULL}, {SLIDING}")
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    return kinds
