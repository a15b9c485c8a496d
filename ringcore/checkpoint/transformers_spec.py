"""Reads the spec of a model that transformers' class computes. It imports of transformers only its table of names,
which imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from ringcore.checkpoint.common_fields import read_bos_token_id, read_dtype, read_eos_token_ids, refuse_quantized
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import MAX_SIZES, TransformersSpec
from ringcore.errors import ModelLoadError

__all__ = ["read_transformers_spec"]

# The names that configurations have for one size, the most frequent first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def read_transformers_spec(config: Metadata, files: ModelFiles) -> TransformersSpec:
    """Raises `ModelLoadError` for a type that this transformers does not have, and for a folder that brings its own
    code, which is never run."""
    model_type = _model_type(config)
    refuse_quantized(config)
    if isinstance(config.get("text_config"), dict):
        raise config.error("text_config", f"is present: of {model_type!r}, a model of several parts, none is computed")
    layers_field = _present(config, _LAYERS)
    architectures = config.get("architectures")
    return TransformersSpec(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        vocab_size=config.integer("vocab_size", high=MAX_SIZES["vocab_size"]),
        num_layers=config.integer(layers_field, high=MAX_SIZES["num_layers"]),
        hidden_size=config.integer(_present(config, _HIDDEN), high=MAX_SIZES["hidden_size"]),
        max_position_embeddings=config.integer(_present(config, _POSITIONS), high=MAX_SIZES["max_position_embeddings"]),
        dtype=read_dtype(config, files),
        bos_token_id=read_bos_token_id(config),
        eos_token_ids=read_eos_token_ids(config, files),
        model_type=model_type,
        config=msgspec.json.encode(config.values).decode(),
        weight_files=files.weight_files if files.kind == "safetensors" else [],
        layers_field=layers_field,
        layer_width=_layer_width(config),
    )


def _model_type(config: Metadata) -> str:
    model_type, known = config.text("model_type"), _known_types()
    if model_type in known:
        return model_type
    if "auto_map" in config:
        raise config.error(
            "auto_map",
            f"names code of the folder for {model_type!r}. There is no trust_remote_code: no code of a model folder is "
            "ever run; give a checkpoint of a type that transformers has, or a transformers that has this one",
        )
    near = difflib.get_close_matches(model_type, known, 3)
    hint = f"did you mean {' or '.join(map(repr, near))}? Otherwise " if near else ""
    raise ModelLoadError(
        f"{config.path}: the model_type {model_type!r} is not one that the installed transformers has; {hint}"
        "install a newer transformers, or give another model",
        path=config.path,
        field="model_type",
    )


def _known_types() -> Mapping[str, str]:
    from transformers.models.auto.auto_mappings import (
        CONFIG_MAPPING_NAMES,
    )  # only where a model needs it: half a second

    names: Mapping[str, str] = CONFIG_MAPPING_NAMES
    return names


def _present(config: Metadata, names: tuple[str, ...]) -> str:
    """The one of these names that the configuration has; the first, for the error, where it has none."""
    return next((name for name in names if name in config), names[0])


def _layer_width(config: Metadata) -> int:
    hidden, heads = config.integer(_present(config, _HIDDEN)), _largest(config, _HEADS, 1)
    inner = _largest(config, _INNER, 4 * hidden) * _largest(config, _EXPERTS_PER_TOKEN, 1)
    return max(3 * inner, 6 * heads * _largest(config, ("head_dim",), -(-hidden // heads)))


def _largest(config: Metadata, names: tuple[str, ...], default: int) -> int:
    """The largest integer of a field that may have one for each layer."""
    value = config.get(_present(config, names))
    found = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
    return max([number for number in found if number > 0], default=default)
