"""Reads what config.json would say from a GGUF header, for models that transformers computes."""

from __future__ import annotations

from typing import Any

import msgspec

from ringcore.checkpoint.family import Families
from ringcore.checkpoint.gguf_architectures import GGUF_ARCHITECTURES, MappedArchitecture
from ringcore.checkpoint.gguf_fields import (
    read_gguf_dtype,
    read_gguf_eos_token_ids,
    read_gguf_token_id,
    read_gguf_vocab_size,
    shortest,
)
from ringcore.checkpoint.gguf_header import GGUFHeader
from ringcore.checkpoint.gguf_rope import read_gguf_rope
from ringcore.checkpoint.gguf_spec import read_gguf_spec
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import MAX_SIZES, ModelSpec, RopeSpec
from ringcore.checkpoint.sliding_windows import FULL, SLIDING
from ringcore.errors import ModelLoadError

__all__ = ["read_gguf_config"]

Config = dict[str, Any]

# Keys that are read for every architecture, beside those of its record.
_KNOWN = ("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length")
_ROPE_KEYS = (
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
# Divisors of RoPE for short and for long sequences: a token would depend on the longest sequence of its batch.
_LONG_ROPE = "rope_factors_long.weight"


def read_gguf_config(header: GGUFHeader, families: Families) -> Metadata:
    """The configuration in transformers' words. Raises `ModelLoadError` for an architecture that is not known, for a
    missing field, and for one that no model here computes."""
    meta = Metadata(header.metadata, header.path)
    name = meta.text("general.architecture")
    record = GGUF_ARCHITECTURES.get(name)
    model_type = families.of_gguf(meta)[0].model_type if name in families.gguf_names else None
    if record is not None:
        config = _of_record(header, meta, name, record)
    elif model_type is not None:
        config = _of_spec(read_gguf_spec(header.path, families), model_type)
    else:
        known = ", ".join(sorted({*families.gguf_names, *GGUF_ARCHITECTURES}))
        raise ModelLoadError(
            f"{header.path}: the architecture {name!r} is not known in GGUF files; known: {known}; "
            "give the model's safetensors folder",
            path=header.path,
            architecture=name,
        )
    common: Config = {
        "vocab_size": read_gguf_vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": read_gguf_dtype(header),
        "bos_token_id": read_gguf_token_id(meta, "bos_token_id"),
        "eos_token_id": read_gguf_eos_token_ids(meta) or None,
        "pad_token_id": read_gguf_token_id(meta, "padding_token_id"),
    }
    return Metadata(config | common, header.path)


def _of_spec(spec: ModelSpec, model_type: str) -> Config:
    config: Config = {
        "model_type": model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "rope_parameters": _rope_parameters(spec.rope),
    }
    if spec.sliding_rope is None:
        return config
    slides = spec.sliding_windows
    return config | {
        "layer_types": [SLIDING if layer in slides else FULL for layer in range(spec.num_layers)],
        "sliding_window": next(iter(slides.values()), None),
        "rope_parameters": {FULL: _rope_parameters(spec.rope), SLIDING: _rope_parameters(spec.sliding_rope)},
        "query_pre_attn_scalar": int(spec.query_pre_attn_scalar or spec.head_dim),
    }


def _rope_parameters(rope: RopeSpec) -> Config:
    """The fields that its kind has; they have transformers' names."""
    names = {"kind": "rope_type", "theta": "rope_theta"}
    fields = {names.get(name, name): value for name, value in msgspec.structs.asdict(rope).items() if value is not None}
    del fields["truncate"]  # a file says nothing of it
    return fields


def _of_record(header: GGUFHeader, meta: Metadata, name: str, record: MappedArchitecture) -> Config:
    _refuse_unknown(header, meta, name, record)
    config: Config = {"model_type": record.model_type}
    for key, field in record.numbers.items():
        config[field] = _number(meta, f"{name}.{key}")
    for key, (field, default) in record.defaults.items():
        full = f"{name}.{key}"
        config[field] = _number(meta, full, low=0) if full in meta else default
    for field, (tensor, dim) in record.shapes.items():
        config[field] = _size(header, tensor, dim)
    if record.bias_field is not None:
        config[record.bias_field] = "blk.0.attn_q.bias" in header.tensors
    config |= _heads(header, meta, name, record)
    return config if record.derive is None else config | record.derive(config)


def _refuse_unknown(header: GGUFHeader, meta: Metadata, name: str, record: MappedArchitecture) -> None:
    known = {*record.numbers, *record.defaults, *record.required_values, *record.ignored, *_KNOWN}
    known |= set(_ROPE_KEYS) if record.rotary else set()
    for key in header.metadata:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise meta.error(key, f"is present, and no model of {record.model_type!r} is known to have it")
    for key, wanted in record.required_values.items():
        if meta.integer(f"{name}.{key}", wanted, low=0) != wanted:
            raise meta.error(f"{name}.{key}", f"is {meta.get(f'{name}.{key}')}; only {wanted} is computed")
    if _LONG_ROPE in header.tensors:
        raise ModelLoadError(
            f"{header.path}: tensor {_LONG_ROPE!r} is present: a rotary embedding that is scaled by the longest "
            "sequence of a batch is not computed",
            path=header.path,
            tensor=_LONG_ROPE,
        )


def _heads(header: GGUFHeader, meta: Metadata, name: str, record: MappedArchitecture) -> Config:
    """Heads, their size and what is rotated of it."""
    num_heads = meta.integer(f"{name}.attention.head_count", high=MAX_SIZES["num_heads"])
    hidden_size = meta.integer(f"{name}.embedding_length", high=MAX_SIZES["hidden_size"])
    if f"{name}.attention.key_length" not in meta and hidden_size % num_heads:
        raise meta.error(f"{name}.attention.head_count", f"is {num_heads}, which does not divide {hidden_size}")
    head_dim = meta.integer(f"{name}.attention.key_length", hidden_size // num_heads, high=MAX_SIZES["head_dim"])
    if meta.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise meta.error(f"{name}.attention.value_length", f"is not the {head_dim} of attention.key_length")
    heads: Config = {"num_key_value_heads": meta.integer(f"{name}.attention.head_count_kv", num_heads)}
    heads["head_dim"] = head_dim
    if not record.rotary:
        return heads
    rotated = meta.integer(f"{name}.rope.dimension_count", head_dim, high=head_dim)
    rope = _rope_parameters(read_gguf_rope(header, meta, name, rotated))
    if rotated != head_dim:
        if not record.partial_rotary:
            raise meta.error(f"{name}.rope.dimension_count", f"is {rotated}; only the head size {head_dim} is computed")
        rope["partial_rotary_factor"] = rotated / head_dim
    return heads | {"rope_parameters": rope}


def _number(meta: Metadata, key: str, low: int = 1) -> int | float | bool:
    """In the type that the file has."""
    value = meta.required(key)
    if isinstance(value, bool):
        return value
    return shortest(meta.number(key)) if isinstance(value, float) else meta.integer(key, low=low)


def _size(header: GGUFHeader, tensor: str, dim: int) -> int:
    info = header.tensors.get(tensor)
    if info is None or len(info.shape) <= dim:
        what = "is missing" if info is None else f"has the shape {list(info.shape)}, more dimensions are needed"
        raise ModelLoadError(f"{header.path}: tensor {tensor!r} {what}", path=header.path, tensor=tensor)
    return info.shape[dim]
