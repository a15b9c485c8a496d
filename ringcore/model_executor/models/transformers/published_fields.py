"""What published models of a type have that its default configuration in transformers lacks, or has otherwise, so that
the default alone cannot be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["with_published_fields"]

_GLM_SECTIONS: Mapping[str, Any] = {
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
}
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},  # CohereLabs/aya-vision-8b
    "glm46v": {"text_config": _GLM_SECTIONS},  # zai-org/GLM-4.6V-Flash
    "glm4v": {"text_config": _GLM_SECTIONS},  # zai-org/GLM-4.1V-9B-Thinking
    "glm4v_moe": {"text_config": {"head_dim": 128, **_GLM_SECTIONS}},  # zai-org/GLM-4.5V
    "glmga": {"text_config": _GLM_SECTIONS},  # its text model is GLM-4V's
}


def with_published_fields(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """config: the default one of the type. A part keeps its other fields."""
    return _merged(config, _PUBLISHED.get(model_type, {}))


def _merged(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in fields.items():
        merged[name] = _merged(merged.get(name) or {}, value) if isinstance(value, Mapping) else value
    return merged
