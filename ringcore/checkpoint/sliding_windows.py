"""Reads which layers have sliding-window attention, from config.json or a GGUF header."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.checkpoint.metadata import Metadata

__all__ = ["read_gguf_windows", "read_windows"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
_GEMMA3_PATTERN = 6  # every sixth layer has full attention
_FIRST_WINDOW_LAYER = 28  # transformers' default of max_window_layers


def read_windows(config: Metadata, architecture: str, num_layers: int) -> dict[int, int]:
    """`ModelSpec.sliding_windows` of config.json. Raises `ModelLoadError` for what the model class does not
    support, for a window below 1, and for layer types that are unknown or do not match the number of layers.
    """
    given = _layer_types(config, num_layers)
    match architecture:
        case "MistralForCausalLM":
            kinds = [_SLIDING if "sliding_window" in config else _FULL] * num_layers
            if given not in (None, kinds):
                raise config.error(
                    "layer_types", "differs from sliding_window, which holds for every layer of a Mistral or for none"
                )
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            kinds = given or _qwen_kinds(config, num_layers)
            if _SLIDING in kinds and not config.flag("use_sliding_window", False):
                raise config.error("layer_types", "has 'sliding_attention' layers, but use_sliding_window is not true")
        case "Gemma3ForCausalLM":
            kinds = given or _every(_gemma3_pattern(config), num_layers)
        case _:
            kinds = given or _qwen_kinds(config, num_layers)
            if _SLIDING in kinds:
                key = "layer_types" if given else "use_sliding_window"
                raise config.error(key, f"asks for {_SLIDING!r} layers, which {architecture} does not have")
    return _windows(kinds, config, "sliding_window")


def read_gguf_windows(meta: Metadata, name: str, num_layers: int) -> dict[int, int]:
    """`ModelSpec.sliding_windows` of a gemma3 GGUF file, whose pattern is a period, or a flag per layer that is true
    for a sliding window. Raises `ModelLoadError` as `read_windows` does.
    """
    key = f"{name}.attention.sliding_window_pattern"
    pattern = meta.get(key)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
            raise meta.error(key, f"is {pattern!r}, true or false for each of {num_layers} layers is needed")
        kinds = [_SLIDING if slides else _FULL for slides in pattern]
    else:
        kinds = _every(meta.integer(key, _GEMMA3_PATTERN), num_layers)
    return _windows(kinds, meta, f"{name}.attention.sliding_window")


def _windows(kinds: Sequence[str], source: Metadata, key: str) -> dict[int, int]:
    if _SLIDING not in kinds:
        return {}
    window = source.integer(key)
    return {layer: window for layer, kind in enumerate(kinds) if kind == _SLIDING}


def _every(period: int, num_layers: int) -> list[str]:
    """Full attention in the last of every `period` layers."""
    return [_FULL if layer % period == period - 1 else _SLIDING for layer in range(num_layers)]


def _gemma3_pattern(config: Metadata) -> int:
    key = next((key for key in _PATTERN_KEYS if key in config), _PATTERN_KEYS[0])
    return config.integer(key, _GEMMA3_PATTERN)


def _qwen_kinds(config: Metadata, num_layers: int) -> list[str]:
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return [_FULL] * num_layers
    first = config.integer("max_window_layers", _FIRST_WINDOW_LAYER, low=0)
    return [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]


def _layer_types(config: Metadata, num_layers: int) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise config.error("layer_types", f"is {kinds!r}, a list is needed")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise config.error("layer_types", f"has {kind!r} layers; known: {_FULL}, {_SLIDING}")
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    return kinds
