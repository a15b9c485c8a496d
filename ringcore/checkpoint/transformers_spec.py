"""Reads the spec of a model that transformers' class computes. It does not import transformers, which takes seconds:
the table of its types is a module that needs no other, and is loaded by its file."""

from __future__ import annotations

import difflib
import runpy
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ringcore.checkpoint.common_fields import read_bos_token_id, read_dtype, read_eos_token_ids
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import MAX_SIZES, TEXT_CONFIG, TransformersSpec
from ringcore.checkpoint.quantization.reader import read_quantization
from ringcore.errors import ModelLoadError

__all__ = ["read_transformers_spec"]

# The names that configurations have for one size, the most frequent first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
_OF_THE_WHOLE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
_DEFAULTS = "ringcore.model_executor.models.transformers.text_defaults"  # a program
_MAX_REASON = 300  # characters
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def read_transformers_spec(config: Metadata, files: ModelFiles, quantization: str | None = None) -> TransformersSpec:
    """quantization: the engine option.

    Raises `ModelLoadError` for a type that this transformers does not have, and for a folder that brings its own code,
    which is never run.
    """
    model_type = _model_type(config)
    if config.get("is_encoder_decoder") is True:
        raise config.error("is_encoder_decoder", f"is true: of {model_type!r}, no encoder is computed")
    text = _text_config(config)
    # A model of several parts says it for all of them, or in the configuration of one.
    says = text if text.get("quantization_config") is not None else config
    layers_field = _present(text, _LAYERS)
    architectures = config.get("architectures")
    return TransformersSpec(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        vocab_size=text.integer("vocab_size", high=MAX_SIZES["vocab_size"]),
        num_layers=text.integer(layers_field, high=MAX_SIZES["num_layers"]),
        hidden_size=text.integer(_present(text, _HIDDEN), high=MAX_SIZES["hidden_size"]),
        max_position_embeddings=text.integer(_present(text, _POSITIONS), high=MAX_SIZES["max_position_embeddings"]),
        dtype=read_dtype(text, files),
        bos_token_id=read_bos_token_id(text),
        eos_token_ids=read_eos_token_ids(text, files),
        model_type=model_type,
        quantization=read_quantization(says, quantization),
        config=msgspec.json.encode(_without_quantization(config.values)).decode(),
        weight_files=files.weight_files if files.kind == "safetensors" else [],
        layers_field=layers_field,
        layer_width=_layer_width(text),
        is_part=TEXT_CONFIG in config,
        num_experts=_largest(text, _EXPERTS, 0),
        expert_size=_largest(text, ("moe_intermediate_size", *_INNER), 0),
    )


def _without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """transformers builds a dense model, whose linears are replaced here."""
    left = {name: value for name, value in values.items() if name != "quantization_config"}
    if isinstance(left.get(TEXT_CONFIG), dict):
        left[TEXT_CONFIG] = _without_quantization(left[TEXT_CONFIG])
    return left


def _text_config(config: Metadata) -> Metadata:
    """The fields of the text model: of a model of several parts those of `text_config`, with what the whole says for
    all. A field that is left out there is transformers' default."""
    text = config.child(TEXT_CONFIG)
    if text is None:
        return config
    values = dict(text.values)
    if any(_present(text, names) not in text for names in (("vocab_size",), _LAYERS, _HIDDEN, _POSITIONS, _HEADS)):
        values = _with_defaults(config)
    values |= {name: config.get(name) for name in _OF_THE_WHOLE if name in config}
    return Metadata(values, config.path, text.prefix)


def _with_defaults(config: Metadata) -> dict[str, Any]:
    """By transformers' class of the configuration, which imports torch: in a process of its own, for seconds."""
    done = subprocess.run(
        [sys.executable, "-m", _DEFAULTS], input=msgspec.json.encode(config.values), capture_output=True, check=False
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise config.error(TEXT_CONFIG, f"is not read by transformers: {' '.join(last)[:_MAX_REASON]}")
    values: dict[str, Any] = msgspec.json.decode(done.stdout)
    return values


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


@cache
def _known_types() -> Mapping[str, str]:
    """transformers' class of each type's configuration."""
    package = find_spec("transformers")
    assert package is not None, "a dependency of this package"
    assert package.submodule_search_locations, package
    path = Path(package.submodule_search_locations[0], "models", "auto", "auto_mappings.py")
    names: Mapping[str, str] = runpy.run_path(str(path))["CONFIG_MAPPING_NAMES"]
    return names


def _present(config: Metadata, names: tuple[str, ...]) -> str:
    """The one of these names that the configuration has; the first, for the error, where it has none."""
    return next((name for name in names if name in config), names[0])


def _layer_width(config: Metadata) -> int:
    hidden, heads = config.integer(_present(config, _HIDDEN)), _largest(config, _HEADS, 1)
    inner, k = _largest(config, _INNER, 4 * hidden), _largest(config, _EXPERTS_PER_TOKEN, 0)
    inner = (inner + hidden) * k if k else inner  # an input and an output for each of its experts too
    return max(3 * inner, 6 * heads * _largest(config, ("head_dim",), -(-hidden // heads)))


def _largest(config: Metadata, names: tuple[str, ...], default: int) -> int:
    """The largest integer of a field that may have one for each layer."""
    value = config.get(_present(config, names))
    found = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
    return max([number for number in found if number > 0], default=default)
