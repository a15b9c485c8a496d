"""Tensors of a GGUF file under their Hugging Face names, dequantized to float32. numpy and `gguf` only."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringcore.checkpoint.family import Families, Family
from ringcore.checkpoint.gguf_header import GGUFTensorInfo, read_gguf_header
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.model_spec import MAX_SIZES
from ringcore.errors import ModelLoadError

__all__ = ["GGUFTensors", "gguf_tensor_names", "read_gguf_tensor"]

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
# Not in a safetensors checkpoint: `gguf_spec` reads the RoPE scaling from it.
_DERIVED = "rope_freqs.weight"
# Bytes of float32 dequantized at once, so that the temporaries stay in the CPU's cache.
_PIECE_BYTES = 1 << 18


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


def read_gguf_tensor(
    path: str | os.PathLike[str], info: GGUFTensorInfo, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Rows `start` to `stop` of one tensor, in the file's own order: float32, [stop - start, *shape[1:]].

    Only the bytes of these rows are read. Raises `ModelLoadError` where the type cannot be dequantized or the
    file is shorter than its header says.
    """
    from gguf.constants import GGMLQuantizationType

    num_rows = info.shape[0] if info.shape else 1
    stop = num_rows if stop is None else stop
    assert 0 <= start <= stop <= num_rows, (info.name, start, stop, num_rows)
    if num_rows == 0 or info.nbytes == 0:
        return np.empty((stop - start, *info.shape[1:]), np.float32)
    kind = GGMLQuantizationType(info.ggml_type)
    if len(info.shape) <= 1:  # a vector may be one quantized block, so it is read whole
        return _dequantize(path, info, kind, _read(path, info, 0, info.nbytes))[start:stop]
    row_bytes = info.nbytes // num_rows
    data = _read(path, info, start * row_bytes, (stop - start) * row_bytes)
    return _dequantize(path, info, kind, data).reshape(stop - start, *info.shape[1:])


def _read(path: str | os.PathLike[str], info: GGUFTensorInfo, begin: int, nbytes: int) -> np.ndarray:
    with open_model_file(path) as file:
        data = np.fromfile(file, np.uint8, nbytes, offset=info.offset + begin)
    if data.nbytes != nbytes:
        raise ModelLoadError(
            f"{path}: truncated: tensor {info.name!r} needs {nbytes} bytes at byte {info.offset + begin}, "
            f"{data.nbytes} are there; download it again",
            path=str(path),
            tensor=info.name,
        )
    return data


def _dequantize(path: str | os.PathLike[str], info: GGUFTensorInfo, kind: Any, data: np.ndarray) -> np.ndarray:
    """Raw bytes -> [n] float32."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind == GGMLQuantizationType.F32:
        return data.view("<f4").astype(np.float32, copy=False)
    if kind == GGMLQuantizationType.F16:
        return data.view("<f2").astype(np.float32)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_size), np.float32)
    step = max(1, _PIECE_BYTES // (block_size * 4))
    try:
        for begin in range(0, len(blocks), step):
            piece = blocks[begin : begin + step]
            # As one row: `gguf` loops over groups of 16 rows in Python.
            values[begin : begin + step] = dequantize(piece.reshape(1, -1), kind).reshape(len(piece), block_size)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{path}: tensor {info.name!r} has the type {kind.name}, which the installed package gguf cannot expand",
            path=str(path),
            tensor=info.name,
        ) from error
    return values.reshape(-1)


class GGUFTensors:
    """The tensors of a GGUF file by their Hugging Face names, rows in the order of a Hugging Face checkpoint."""

    def __init__(self, path: str | os.PathLike[str], families: Families) -> None:
        """Reads the header. Raises `ModelLoadError`, also for a tensor that the family does not have."""
        header = read_gguf_header(path)
        self.path = header.path
        meta = Metadata(header.metadata, header.path)
        stored, family = families.of_gguf(meta)
        name = stored.name
        self._num_heads = meta.integer(f"{name}.attention.head_count")
        self._num_kv_heads = meta.integer(f"{name}.attention.head_count_kv", self._num_heads)
        self._interleaved = stored.interleaved_rope
        self._norms_plus_one = family.norm_plus_one  # the sum is stored, a Hugging Face checkpoint has the weight
        self._infos: dict[str, GGUFTensorInfo] = {}
        unknown = dict(header.tensors)
        unknown.pop(_DERIVED, None)
        num_layers = meta.integer(f"{name}.block_count", high=MAX_SIZES["num_layers"])
        for hf_name, gguf_name in gguf_tensor_names(family, num_layers).items():
            if gguf_name in unknown:
                self._infos[hf_name] = unknown.pop(gguf_name)
        if unknown:
            first = min(unknown)
            raise ModelLoadError(
                f"{self.path}: {len(unknown)} tensors are not known for {name!r}, the first is {first!r}",
                path=self.path,
                tensor=first,
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its Hugging Face name, in the order of the model."""
        return {name: info.shape for name, info in self._infos.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` (None: all) of a tensor: float32, [stop - start, *shape[1:]].

        Raises `KeyError` for a name that is not in `shapes`, `ModelLoadError` where the data cannot be read.
        """
        info = self._infos[name]
        stop = info.shape[0] if stop is None else stop
        heads = self._heads(name)
        if heads is None:
            values = read_gguf_tensor(self.path, info, start, stop)
            return values - 1 if self._norms_plus_one and info.name.endswith("norm.weight") else values
        # Rows are permuted within a head, so whole heads are read.
        head_dim = info.shape[0] // heads
        first, last = start // head_dim, -(-stop // head_dim)
        rows = read_gguf_tensor(self.path, info, first * head_dim, last * head_dim)
        halves = rows.reshape(last - first, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        return halves[start - first * head_dim : stop - first * head_dim]

    def _heads(self, name: str) -> int | None:
        """The number of heads whose rows are interleaved, None where they are not."""
        if not self._interleaved:
            return None
        if ".q_proj." in name:
            return self._num_heads
        return self._num_kv_heads if ".k_proj." in name else None
