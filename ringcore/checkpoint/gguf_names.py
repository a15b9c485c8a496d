"""The tensors of a GGUF file under their Hugging Face names: where each lies, and how it is stored there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ringcore.checkpoint.family import Families, Family, GGUFFormat
from ringcore.checkpoint.gguf_architectures import GGUF_ARCHITECTURES, MappedArchitecture
from ringcore.checkpoint.gguf_header import GGUFHeader, GGUFTensorInfo
from ringcore.checkpoint.gguf_library_names import library_names, without_expert
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import MAX_SIZES
from ringcore.errors import ModelLoadError

__all__ = ["StoredTensor", "gguf_tensor_names", "stored_tensors"]

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",  # absent where the embeddings are tied
}
_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Not in a safetensors checkpoint: `gguf_rope` reads the RoPE scaling from it.
_DERIVED = "rope_freqs.weight"
# A linear of one output, which some files have as a vector.
_ONE_OUTPUT = "ffn_gate_inp_shexp.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A Hugging Face checkpoint's tensor in terms of a file's."""

    infos: tuple[GGUFTensorInfo, ...]  # of several, entries along dimension 1 alternate
    num_turned_heads: int | None = None  # so many heads, whose rows are stored for interleaved RoPE
    plus_one: bool = False  # 1 is to be taken off
    transposed: bool = False  # the last two dimensions are to be exchanged

    @property
    def shape(self) -> tuple[int, ...]:
        """As the Hugging Face checkpoint has it."""
        shape = list(self.infos[0].shape)
        if len(self.infos) > 1:
            shape[1] *= len(self.infos)
        if self.transposed:
            shape[-2:] = reversed(shape[-2:])
        return tuple(shape)


def stored_tensors(header: GGUFHeader, families: Families, wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """By Hugging Face name, in the order of the model. wanted: names in a checkpoint of an architecture that has no
    family; those that the file lacks are left out.

    Raises `ModelLoadError` where the file has a tensor that the model has not.
    """
    meta = Metadata(header.metadata, header.path)
    name = meta.text("general.architecture")
    num_layers = meta.integer(f"{name}.block_count", high=MAX_SIZES["num_layers"])
    record = GGUF_ARCHITECTURES.get(name)
    if record is not None:
        tensors = _of_record(header, name, record, num_layers, wanted)
    else:
        tensors = _of_family(header, meta, *families.of_gguf(meta), num_layers)
    used = {info.name for stored in tensors.values() for info in stored.infos}
    unknown = sorted(set(header.tensors) - used - {_DERIVED})
    if unknown:
        raise ModelLoadError(
            f"{header.path}: {len(unknown)} tensors are not known for {name!r}, the first is {unknown[0]!r}",
            path=header.path,
            tensor=unknown[0],
        )
    return tensors


def _of_family(
    header: GGUFHeader, meta: Metadata, stored: GGUFFormat, family: Family, num_layers: int
) -> dict[str, StoredTensor]:
    num_heads = meta.integer(f"{stored.name}.attention.head_count")
    num_kv_heads = meta.integer(f"{stored.name}.attention.head_count_kv", num_heads)
    turned = {".q_proj.": num_heads, ".k_proj.": num_kv_heads} if stored.interleaved_rope else {}
    return {
        hf_name: StoredTensor(
            infos=(header.tensors[name],),
            num_turned_heads=next((heads for part, heads in turned.items() if part in hf_name), None),
            plus_one=family.norm_plus_one and name.endswith("norm.weight"),
        )
        for hf_name, name in gguf_tensor_names(family, num_layers).items()
        if name in header.tensors
    }


def gguf_tensor_names(family: Family, num_layers: int) -> dict[str, str]:
    """Hugging Face name -> GGUF name, for every possible tensor of a model of this family."""
    in_layer = {f"{hf}.weight": f"{ggml}.weight" for hf, ggml in _norms(family) + list(_LINEARS.items())}
    in_layer |= {f"{hf}.bias": f"{ggml}.bias" for hf, ggml in _LINEARS.items()}
    names = {f"{hf}.weight": f"{ggml}.weight" for hf, ggml in _TOP.items()}
    for layer in range(num_layers):
        names.update((f"model.layers.{layer}.{hf}", f"blk.{layer}.{ggml}") for hf, ggml in in_layer.items())
    return names


def _norms(family: Family) -> list[tuple[str, str]]:
    """(Hugging Face name, GGUF name): GGML names a norm by its place in the layer, whatever the family calls it."""
    norms = family.norms
    places = (
        (norms.input, "attn_norm"),
        (norms.query, "attn_q_norm"),
        (norms.key, "attn_k_norm"),
        (norms.attention_out, "post_attention_norm"),
        (norms.mlp, "ffn_norm"),
        (norms.mlp_out, "post_ffw_norm"),
    )
    return [(hf, ggml) for hf, ggml in places if hf is not None]


def _of_record(
    header: GGUFHeader, name: str, record: MappedArchitecture, num_layers: int, wanted: Iterable[str]
) -> dict[str, StoredTensor]:
    names = _library_names(header, name, num_layers)
    found = {hf_name: _find(hf_name, header.tensors, record, names) for hf_name in wanted}
    return {hf_name: stored for hf_name, stored in found.items() if stored is not None}


def _library_names(header: GGUFHeader, name: str, num_layers: int) -> Callable[[str], str | None]:
    """The map of the package `gguf`: a Hugging Face name without weight or bias -> the GGUF name, None if unknown."""
    names = library_names(name, num_layers)
    if names is None:
        raise ModelLoadError(
            f"{header.path}: the installed package gguf does not know {name!r}; install a newer one",
            path=header.path,
            architecture=name,
        )
    return names


def _find(
    hf_name: str,
    tensors: Mapping[str, GGUFTensorInfo],
    record: MappedArchitecture,
    names: Callable[[str], str | None],
) -> StoredTensor | None:
    """A file has the experts of a layer in one tensor, of which a Hugging Face tensor may be one."""
    alias = next((alias for alias in record.aliases if hf_name.endswith(f".{alias}")), None)
    ends = [hf_name] if alias is None else [hf_name.removesuffix(alias) + end for end in record.aliases[alias]]
    infos = []
    for one in ends:
        of_all, expert = without_expert(one)
        stem, _, suffix = of_all.rpartition(".")
        info = tensors.get(f"{names(stem)}.{suffix}")
        if info is None or (expert is not None and expert >= info.shape[0]):
            return None
        infos.append(info if expert is None else _expert(info, expert))
    first = infos[0].name
    if first.endswith(_ONE_OUTPUT) and len(infos[0].shape) == 1:
        infos = [msgspec.structs.replace(infos[0], shape=(1, *infos[0].shape))]
    return StoredTensor(
        infos=tuple(infos),
        plus_one=record.norm_plus_one and first.endswith("norm.weight"),
        transposed=any(first.endswith(f".{one}.weight") for one in record.transposed),
    )


def _expert(info: GGUFTensorInfo, index: int) -> GGUFTensorInfo:
    """One entry along the first dimension; quantized blocks run along the last."""
    nbytes = info.nbytes // info.shape[0]
    return msgspec.structs.replace(info, shape=info.shape[1:], offset=info.offset + index * nbytes, nbytes=nbytes)
