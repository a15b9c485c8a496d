"""Whether the matrices of a GGUF file stay in its blocks: the engine option `gguf_weights`."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint import AnySpec, ModelFiles, ModelSpec
from ringcore.checkpoint.expected_tensors import num_parameters
from ringcore.checkpoint.gguf_architectures import GGUF_ARCHITECTURES, MappedArchitecture
from ringcore.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.checkpoint.quantization import GGUF_BLOCKS, BlockKinds, GgufFormat, Quantization, Rule
from ringcore.config.value_checks import bad_value
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.kv_cache.spec import DTYPE_BYTES

__all__ = ["with_gguf_weights"]

_SHARE = 0.5  # of the free memory that expanded weights may take by themselves: the KV cache needs some too
_VOCABULARY = "token_embd.", "output."
_ROUTERS = "ffn_gate_inp", "ffn_gate_inp_shexp"  # small, and numbers in most files


def with_gguf_weights(spec: AnySpec, files: ModelFiles, asked: str, dtype: str, device: str, host: Host) -> AnySpec:
    """The spec with the formats of the matrices that stay packed. asked, dtype, device: the engine options.

    Raises `ConfigError` where packing is asked and cannot be, `ModelLoadError` as `GGUFTensors` does.
    """
    if asked == "expanded" or (asked == "auto" and files.kind != "gguf"):
        return spec
    refusal = _refusal(files, device, host)
    if refusal is not None:
        if asked != "auto":
            raise bad_value("gguf_weights", asked, refusal)
        return spec
    num_bytes = num_parameters(files) * DTYPE_BYTES[spec.dtype if dtype == "auto" else dtype]
    if asked == "auto" and host.c_compiler() is None and num_bytes <= _SHARE * host.free_memory_bytes():
        return spec
    return msgspec.structs.replace(spec, quantization=_formats(spec, files.weight_files[0], asked == "packed_int8"))


def _refusal(files: ModelFiles, device: str, host: Host) -> str | None:
    if files.kind != "gguf":
        return "the model is no .gguf file; leave it out"
    if device == "cuda" or (device == "auto" and host.has_gpu()):
        return "a GPU has no kernels for it; give device='cpu', or 'expanded'"
    return None


def _formats(spec: AnySpec, path: str, rounds_inputs: bool) -> Quantization | None:
    """None where no matrix has a known type."""
    header = read_gguf_header(path)
    record = GGUF_ARCHITECTURES.get(header.metadata["general.architecture"])
    if record is None:
        return _of_family(spec, path, rounds_inputs)
    return _of_record(spec, header, record, rounds_inputs)


def _of_record(
    spec: AnySpec, header: GGUFHeader, record: MappedArchitecture, rounds_inputs: bool
) -> Quantization | None:
    from gguf.constants import GGMLQuantizationType

    kinds = {
        tensor.removesuffix(".weight"): GGMLQuantizationType(info.ggml_type).name
        for tensor, info in header.tensors.items()
        if tensor.startswith(("blk.", *_VOCABULARY)) and len(info.shape) > 1
    }
    packed = {
        matrix: kind
        for matrix, kind in kinds.items()
        if kind in GGUF_BLOCKS and matrix.rpartition(".")[2] not in (*record.transposed, *_ROUTERS)
    }
    name = header.metadata["general.architecture"]
    blocks = BlockKinds(name, spec.num_layers, packed, rounds_inputs)
    return Quantization("gguf", [], blocks=blocks) if packed else None


def _of_family(spec: AnySpec, path: str, rounds_inputs: bool) -> Quantization | None:
    found: dict[str, list[str]] = {}
    for name, kind in GGUFTensors(path, FAMILIES).kinds().items():
        if kind in GGUF_BLOCKS:
            found.setdefault(kind, []).append(name.removesuffix(".weight"))
    if isinstance(spec, ModelSpec) and spec.tie_word_embeddings:  # the head multiplies by the table
        for names in found.values():
            names += ["lm_head"] if "model.embed_tokens" in names else []
    rules = [Rule(names, GgufFormat(kind, rounds_inputs)) for kind, names in found.items()]
    return Quantization("gguf", rules) if rules else None
