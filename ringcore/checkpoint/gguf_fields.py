"""The fields of a GGUF header that every kind of spec has."""

from __future__ import annotations

import numpy as np

from ringcore.checkpoint.gguf_header import GGUFHeader
from ringcore.checkpoint.metadata import Metadata
from ringcore.errors import ModelLoadError

__all__ = ["read_gguf_dtype", "read_gguf_eos_token_ids", "read_gguf_token_id", "read_gguf_vocab_size", "shortest"]

# A quantized weight is exact only in float32, to which it is expanded.
_FILE_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def shortest(value: float) -> float:
    """A float32 of the file as the decimal number it was made from: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def read_gguf_vocab_size(header: GGUFHeader) -> int:
    """By the embedding, since the list of tokens may be shorter."""
    path, name = header.path, "token_embd.weight"
    embedding = header.tensors.get(name)
    if embedding is None:
        raise ModelLoadError(f"{path}: tensor {name!r} is missing", path=path, tensor=name)
    if len(embedding.shape) != 2:
        raise Metadata(header.metadata, path).error(name, f"has the shape {list(embedding.shape)}, a matrix is needed")
    return embedding.shape[0]


def read_gguf_dtype(header: GGUFHeader) -> str:
    """The dtype that holds the type that most bytes of the matrices have."""
    sizes: dict[int, int] = {}
    for info in header.tensors.values():
        if len(info.shape) >= 2:
            sizes[info.ggml_type] = sizes.get(info.ggml_type, 0) + info.nbytes
    return _FILE_DTYPES.get(max(sizes, key=lambda kind: sizes[kind]) if sizes else 0, "float32")


def read_gguf_token_id(meta: Metadata, key: str) -> int | None:
    """key: "bos_token_id", or another of `tokenizer.ggml`."""
    key = f"tokenizer.ggml.{key}"
    return meta.integer(key, low=0) if key in meta else None


def read_gguf_eos_token_ids(meta: Metadata) -> list[int]:
    """The ids that end a completion."""
    return list(dict.fromkeys(i for key in _END_KEYS if (i := read_gguf_token_id(meta, key)) is not None))
