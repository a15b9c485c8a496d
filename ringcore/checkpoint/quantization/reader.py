"""Reads `quantization_config`: of compressed-tensors in its own module, of FP8 in blocks, AWQ, GPTQ and MXFP4 here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.quantization.compressed_tensors import read_block, read_compressed_tensors
from ringcore.checkpoint.quantization.expert_formats import Mxfp4Format
from ringcore.checkpoint.quantization.fields import checked_patterns, refuse_others, require
from ringcore.checkpoint.quantization.formats import AwqFormat, CodesFormat, GptqFormat, OnLoadFormat
from ringcore.checkpoint.quantization.inputs import InputFormat
from ringcore.checkpoint.quantization.rules import ALL_LINEARS, Quantization, Rule

__all__ = ["quantization_methods", "read_quantization"]

_LM_HEAD = "lm_head"
# Fields that say how the model was quantized, or how another program is to run it, not what its tensors mean.
_OF_OTHERS = frozenset(
    [
        "quant_method",
        "backend",
        "dataset",
        "tokenizer",
        "batch_size",
        "damp_percent",
        "damp_auto_increment",
        "true_sequential",
        "static_groups",
        "model_name_or_path",
        "model_file_base_name",
        "block_name_to_quantize",
        "module_name_preceding_first_block",
        "pad_token_id",
        "model_seqlen",
        "max_input_length",
        "cache_block_outputs",
        "use_cuda_fp16",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "meta",
        "quantizer",
        "desc_act_order",
        "group_aware",
        "mse",
    ]
)


def read_quantization(config: Metadata, on_load: str | None) -> Quantization | None:
    """config: config.json, or that of its text model. on_load: the engine option `quantization`. None: dense weights.

    Raises `ModelLoadError` that names the field whose value is not computed here.
    """
    if "quantization_config" not in config:
        return None if on_load is None else _on_load(on_load)
    found = config.child("quantization_config")
    if found is None:
        raise config.error("quantization_config", "is empty; remove it from a checkpoint that is not quantized")
    if on_load is not None:
        raise config.error(
            "quantization_config", f"is present, and quantization={on_load!r} needs a 16-bit checkpoint; leave it out"
        )
    method = found.text("quant_method")
    if method not in _METHODS:
        known = ", ".join(sorted(map(repr, _METHODS)))
        raise found.error("quant_method", f"is {method!r}; known: {known}; give a checkpoint in one of them")
    return _METHODS[method](found)


def quantization_methods() -> tuple[str, ...]:
    """Every `quant_method` that is read."""
    return tuple(sorted(_METHODS))


def _on_load(number: str) -> Quantization:
    assert number in ("fp8", "int4"), number
    form = OnLoadFormat("fp8" if number == "fp8" else "int4")
    return Quantization(f"{number} on load", [Rule([ALL_LINEARS], form)], [_LM_HEAD])


def _fp8(config: Metadata) -> Quantization:
    refuse_others(
        config,
        _OF_OTHERS
        | {"fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"},
    )
    require(config, "fmt", (None, "e4m3"), "give a checkpoint in e4m3")
    require(config, "activation_scheme", ("dynamic",), "static scales are read of compressed-tensors")
    require(config, "dequantize", (None, False), "leave it out: the weights stay as they are")
    if "weight_block_size" not in config:
        raise config.error(
            "weight_block_size", "is missing; scales of blocks are read here, those of channels of compressed-tensors"
        )
    block = read_block(config, "weight_block_size")
    form = CodesFormat("fp8", "block", block, "weight_scale_inv", InputFormat("fp8", "group", block[1]))
    ignored = [*checked_patterns(config, "modules_to_not_convert"), *checked_patterns(config, "ignored_layers")]
    return Quantization("fp8", [Rule([ALL_LINEARS], form)], [_LM_HEAD, *ignored])


def _awq(config: Metadata) -> Quantization:
    refuse_others(config, _OF_OTHERS | {"bits", "group_size", "zero_point", "version", "modules_to_not_convert"})
    require(config, "bits", (4,), "quantize to 4 bits")
    require(config, "zero_point", (True,), "quantize with zero points")
    require(config, "version", (None, "gemm", "GEMM"), "save it in the version 'gemm'")
    form = AwqFormat(_group_size(config))
    return Quantization(
        "awq", [Rule([ALL_LINEARS], form)], [_LM_HEAD, *checked_patterns(config, "modules_to_not_convert")]
    )


def _gptq(config: Metadata) -> Quantization:
    known = (
        "bits group_size desc_act sym checkpoint_format is_marlin_format lm_head dynamic pack_dtype "
        "modules_in_block_to_quantize"
    )
    refuse_others(config, _OF_OTHERS | set(known.split()))
    bits = require(config, "bits", (4, 8), "quantize to 4 or 8 bits")
    require(config, "checkpoint_format", (None, "gptq"), "save it in the format 'gptq'")
    require(config, "is_marlin_format", (None, False), "save it in the format 'gptq'")
    require(config, "pack_dtype", (None, "int32"), "pack into int32")
    require(config, "dynamic", (None, {}), "quantize all linears alike")
    config.flag("sym", True)  # the zeros are stored either way
    form = GptqFormat(bits, _group_size(config), config.flag("desc_act", False))
    targets = [ALL_LINEARS]
    inside = config.get("modules_in_block_to_quantize")
    if inside is not None:
        flat = [name for names in inside for name in (names if isinstance(names, list) else [names])]
        targets = checked_patterns(
            Metadata({"modules_in_block_to_quantize": flat}, config.path, config.prefix), "modules_in_block_to_quantize"
        )
    if config.flag("lm_head", False):
        targets = [*targets, _LM_HEAD]
        return Quantization("gptq", [Rule(targets, form)])
    return Quantization("gptq", [Rule(targets, form)], [_LM_HEAD])


def _mxfp4(config: Metadata) -> Quantization:
    """Of experts alone."""
    refuse_others(config, {"quant_method", "modules_to_not_convert", "dequantize"})
    require(config, "dequantize", (None, False), "leave it out: the weights stay as they are")
    field = "modules_to_not_convert"
    for pattern in checked_patterns(config, field):
        if "experts" in pattern:
            raise config.error(field, f"has {pattern!r}: experts are all in MXFP4, or none; give a checkpoint without")
    return Quantization("mxfp4", [], experts=Mxfp4Format())


def _group_size(config: Metadata) -> int | None:
    """-1 is one group of all inputs."""
    return None if config.get("group_size") == -1 else config.integer("group_size")


_METHODS: Mapping[str, Callable[[Metadata], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
