"""Reads the rotary embedding of config.json, in the words of transformers 5 (`rope_parameters`) and before."""

from __future__ import annotations

from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import RopeSpec

__all__ = ["ROPE_KINDS", "read_rope"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


def read_rope(config: Metadata, max_position_embeddings: int) -> RopeSpec:
    """The rotary embedding; raises `ModelLoadError` for a kind that is not known, by its name.

    `rope_theta` stands in the parameters since transformers 5, beside `rope_scaling` before.
    `original_max_position_embeddings` is `max_position_embeddings` where absent, as transformers has it.
    """
    scaling = config.child("rope_scaling") or config.child("rope_parameters")
    if scaling is None:
        _refuse_partial(config)
        return RopeSpec(theta=config.number("rope_theta", DEFAULT_THETA))
    for source in (config, scaling):
        _refuse_partial(source)
    theta = scaling.number("rope_theta") if "rope_theta" in scaling else config.number("rope_theta", DEFAULT_THETA)
    key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(key, "default")
    if kind not in ROPE_KINDS:
        raise scaling.error(key, f"is {kind!r}; known: {', '.join(ROPE_KINDS)}")
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
