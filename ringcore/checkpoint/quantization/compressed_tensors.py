"""Reads the `quantization_config` of compressed-tensors."""

from __future__ import annotations

from typing import Literal

from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.quantization.fields import checked_patterns, refuse_others, require
from ringcore.checkpoint.quantization.formats import CodesFormat, Format, PackedFormat
from ringcore.checkpoint.quantization.inputs import InputFormat
from ringcore.checkpoint.quantization.rules import Quantization, Rule

__all__ = ["read_compressed_tensors"]

_FIELDS = frozenset(
    [
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "kv_cache_scheme",
        "sparsity_config",
        "transform_config",
        "quantization_status",
        "global_compression_ratio",
        "version",
    ]
)
_GROUP_FIELDS = frozenset(["targets", "weights", "input_activations", "output_activations", "format"])
_ARGS_FIELDS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "block_structure",
        "dynamic",
        "actorder",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    ]
)
_PACKED, _CODES = "pack-quantized", ("float-quantized", "int-quantized", "naive-quantized")
_MIXED = "mixed-precision"


def read_compressed_tensors(config: Metadata) -> Quantization:
    refuse_others(config, _FIELDS)
    require(config, "quantization_status", (None, "compressed", "frozen"), "compress the weights when saving")
    _check_kv_cache(config)
    for field in ("sparsity_config", "transform_config"):
        if config.get(field) not in (None, {}) and not _is_dense(config, field):
            raise config.error(
                field, f"is {config.get(field)!r}, which is not computed; save the checkpoint without it"
            )
    groups, form = config.child("config_groups"), config.text("format")
    if groups is None:
        raise config.error("config_groups", "is missing; give a checkpoint that says how its weights are quantized")
    rules = []
    for name in groups.values:
        group = groups.child(name)
        if group is None:
            raise groups.error(name, "is empty; give its targets and weights")
        refuse_others(group, _GROUP_FIELDS)
        rules.append(Rule(checked_patterns(group, "targets"), _format(group, form)))
    return Quantization("compressed-tensors", rules, checked_patterns(config, "ignore"))


def _check_kv_cache(config: Metadata) -> None:
    """FP8 is read and left to the engine option kv_cache_dtype, whose scales are each token's own."""
    scheme = config.child("kv_cache_scheme")
    if scheme is not None and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise config.error(
            "kv_cache_scheme",
            f"is {config.get('kv_cache_scheme')!r}, which is not computed; known: num_bits 8 of type 'float'; save the "
            "checkpoint without it",
        )


def _is_dense(config: Metadata, field: str) -> bool:
    return field == "sparsity_config" and config.get(field) == {"format": "dense"}


def _format(group: Metadata, form: str) -> Format:
    form = group.text("format", form)
    weights = group.child("weights")
    if weights is None:
        raise group.error("weights", "is missing; dense matrices belong in 'ignore'")
    refuse_others(weights, _ARGS_FIELDS)
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "is present; outputs are not quantized: save the checkpoint without it")
    require(weights, "dynamic", (None, False), "give weights with scales of their own")
    inputs = _inputs(group.child("input_activations"))
    if form == _PACKED:
        if inputs is not None:
            raise group.error("input_activations", f"is present, which {_PACKED!r} has no product for; leave it out")
        return _packed(weights)
    if form not in _CODES:
        known = ", ".join(map(repr, (_PACKED, *_CODES)))
        raise group.error("format", f"is {form!r}; known: {known}; quantize the model to one of them")
    return _codes(weights, inputs)


def _packed(weights: Metadata) -> PackedFormat:
    bits = require(weights, "num_bits", (4, 8), "quantize to 4 or 8 bits")
    require(weights, "type", (None, "int"), "quantize to integers")
    strategy = require(weights, "strategy", ("group", "channel"), "quantize by groups or channels")
    actorder = require(
        weights, "actorder", (None, False, "static", "weight", True, "group"), "quantize with 'static' or 'group'"
    )
    group = weights.integer("group_size") if strategy == "group" else None
    has_order = actorder in (True, "group")
    return PackedFormat(bits, group, not weights.flag("symmetric", True), has_order and group is not None)


def _codes(weights: Metadata, inputs: InputFormat | None) -> CodesFormat:
    require(weights, "num_bits", (8,), "quantize to 8 bits, or save as 'pack-quantized'")
    number = _number(weights)
    require(weights, "symmetric", (None, True), "quantize symmetrically, or save as 'pack-quantized'")
    require(weights, "actorder", (None, False, "static", "weight"), "quantize without act-order")
    strategy = require(weights, "strategy", ("tensor", "channel", "group", "block"), "quantize by one of them")
    block = (1, 1)
    if strategy == "group":
        block = 1, weights.integer("group_size")
    elif strategy == "block":
        block = read_block(weights, "block_structure")
    return CodesFormat(number, strategy, block, inputs=inputs)


def read_block(config: Metadata, field: str) -> tuple[int, int]:
    """(outputs, inputs)."""
    value = config.required(field)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(one) is int and 0 < one < 1 << 20 for one in value)
    ):
        raise config.error(field, f"is {value!r}, a list of two sizes is needed, such as [128, 128]")
    return value[0], value[1]


def _inputs(activations: Metadata | None) -> InputFormat | None:
    if activations is None:
        return None
    refuse_others(activations, _ARGS_FIELDS)
    require(activations, "num_bits", (8,), "quantize activations to 8 bits, or not at all")
    require(activations, "symmetric", (None, True), "quantize activations symmetrically")
    number = _number(activations)
    if require(activations, "dynamic", (None, True, False), "give true, or false for 'tensor'"):
        strategy = require(activations, "strategy", ("token", "group"), "quantize activations by token or group")
        return InputFormat(number, strategy, activations.integer("group_size") if strategy == "group" else 0)
    require(activations, "strategy", ("tensor",), "static scales are of the tensor")
    return InputFormat(number, "tensor")


def _number(args: Metadata) -> Literal["fp8", "int8"]:
    return "fp8" if require(args, "type", ("float", "int"), "quantize to one of them") == "float" else "int8"
