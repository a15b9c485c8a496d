"""Reads the rotary embedding from config.json, in the fields of transformers 5 (`rope_parameters`) and earlier."""

from __future__ import annotations

from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import RopeSpec

__all__ = ["DEFAULT_THETA", "read_one_rope", "rope_from"]

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_one_rope(config: Metadata, max_position_embeddings: int) -> tuple[RopeSpec, None]:
    """The rotary embedding of all layers. Raises `ModelLoadError` that names an unknown kind.

    `rope_theta` is in `rope_parameters` since transformers 5, and beside `rope_scaling` before.
    `original_max_position_embeddings` defaults to `max_position_embeddings`, as in transformers.
    """
    scaling = config.child("rope_scaling") or config.child("rope_parameters")
    if scaling is not None and (kinds := [key for key in _LAYER_TYPES if key in scaling]):
        raise scaling.error(kinds[0], "is not known: this architecture has one rotary embedding for all layers")
    return rope_from(config, scaling, config.number("rope_theta", DEFAULT_THETA), max_position_embeddings), None


def rope_from(config: Metadata, scaling: Metadata | None, theta: float, max_position_embeddings: int) -> RopeSpec:
    """From `scaling`, whose own rope_theta takes precedence over `theta`. Raises as `read_one_rope` does."""
    _refuse_partial(config)
    if scaling is not None:
        _refuse_partial(scaling)
        theta = scaling.number("rope_theta", theta)
    if theta <= 1:
        raise config.error("rope_theta", f"is {theta}, it must be above 1: frequencies fall")
    if scaling is None:
        return RopeSpec(theta=theta)
    key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(key, "default")
    if kind not in _ROPE_KINDS:
        raise scaling.error(key, f"is {kind!r}; known: {', '.join(_ROPE_KINDS)}")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=scaling.number("factor"))
    at_top = config if "original_max_position_embeddings" in config else scaling
    original = at_top.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        return _llama3(scaling, theta, original)
    return _yarn(scaling, theta, original, max_position_embeddings)


def _refuse_partial(source: Metadata) -> None:
    if source.number("partial_rotary_factor", 1.0) != 1.0:
        raise source.error("partial_rotary_factor", f"is {source.get('partial_rotary_factor')}; only 1 is computed")


def _llama3(scaling: Metadata, theta: float, original: int) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", f"is {high}, it must be above low_freq_factor {low}")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Metadata, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=scaling.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number_or_none("attention_factor"),
        mscale=scaling.number_or_none("mscale"),
        mscale_all_dim=scaling.number_or_none("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
    )
