"""Whether the matrices of a GGUF file stay in its blocks: the engine option `gguf_weights`."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint import AnySpec, ModelFiles, ModelSpec
from ringcore.checkpoint.expected_tensors import num_parameters
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.checkpoint.quantization import GGUF_BLOCKS, GgufFormat, Quantization, Rule
from ringcore.config.value_checks import bad_value
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.kv_cache.spec import DTYPE_BYTES

__all__ = ["with_gguf_weights"]

_SHARE = 0.5  # of the free memory that expanded weights may take by themselves: the KV cache needs some too


def with_gguf_weights(spec: AnySpec, files: ModelFiles, asked: str, dtype: str, device: str, host: Host) -> AnySpec:
    """The spec with the formats of the matrices that stay packed. asked, dtype, device: the engine options.

    Raises `ConfigError` where packing is asked and cannot be, `ModelLoadError` as `GGUFTensors` does.
    """
    if asked == "expanded" or (asked == "auto" and files.kind != "gguf"):
        return spec
    refusal = _refusal(spec, files, device, host)
    if refusal is not None:
        if asked != "auto":
            raise bad_value("gguf_weights", asked, refusal)
        return spec
    num_bytes = num_parameters(files) * DTYPE_BYTES[spec.dtype if dtype == "auto" else dtype]
    if asked == "auto" and host.c_compiler() is None and num_bytes <= _SHARE * host.free_memory_bytes():
        return spec
    assert isinstance(spec, ModelSpec)
    return msgspec.structs.replace(spec, quantization=_formats(spec, files.weight_files[0], asked == "packed_int8"))


def _refusal(spec: AnySpec, files: ModelFiles, device: str, host: Host) -> str | None:
    if files.kind != "gguf":
        return "the model is no .gguf file; leave it out"
    if not isinstance(spec, ModelSpec):
        return f"{spec.architecture} is computed by modules of transformers, which need numbers; give 'expanded'"
    if device == "cuda" or (device == "auto" and host.has_gpu()):
        return "a GPU has no kernels for it; give device='cpu', or 'expanded'"
    return None


def _formats(spec: ModelSpec, path: str, rounds_inputs: bool) -> Quantization | None:
    """None where no matrix has a known type."""
    found: dict[str, list[str]] = {}
    for name, kind in GGUFTensors(path, FAMILIES).kinds().items():
        if kind in GGUF_BLOCKS:
            found.setdefault(kind, []).append(name.removesuffix(".weight"))
    if spec.tie_word_embeddings:  # the head multiplies by the table
        for names in found.values():
            names += ["lm_head"] if "model.embed_tokens" in names else []
    rules = [Rule(names, GgufFormat(kind, rounds_inputs)) for kind, names in found.items()]
    return Quantization("gguf", rules) if rules else None
