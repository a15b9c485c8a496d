"""Writes a model folder as a GGUF file whose linears have one type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.driver import BenchmarkError
from ringcore.checkpoint import ModelSpec, find_model, read_model_spec
from ringcore.checkpoint.gguf_names import gguf_tensor_names
from ringcore.families import FAMILIES

__all__ = ["write_gguf", "write_header"]


def write_gguf(folder: str, path: Path, kind: str) -> None:
    """kind: of the linears, one that the package `gguf` can make; embedding and head are float16, vectors float32.

    Raises `BenchmarkError` for a model that has no class of its own, or whose RoPE is scaled.
    """
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES)
    if not isinstance(spec, ModelSpec) or spec.rope.kind != "default" or spec.experts is not None:
        raise BenchmarkError(f"{folder}: not written as GGUF; give a dense Llama, Qwen2 or Qwen3 with plain RoPE")
    family = FAMILIES[spec.architecture]
    assert family.gguf is not None, spec.architecture
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if family.gguf.interleaved_rope else {}
    writer = gguf.GGUFWriter(path, family.gguf.name)
    write_header(writer, spec)
    tensors: dict[str, torch.Tensor] = {}
    for file in files.weight_files:
        tensors |= load_file(file)
    for name, stored in gguf_tensor_names(family, spec.num_layers).items():
        if name not in tensors or (name == "lm_head.weight" and spec.tie_word_embeddings):
            continue
        values = _interleaved(tensors[name].float().numpy(), heads.get(name.split(".")[-2]))
        type_ = gguf.GGMLQuantizationType[_kind(name, values, kind)]
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(values), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(name: str, values: np.ndarray, kind: str) -> str:
    if values.ndim == 1:
        return "F32"
    return kind if "_proj." in name else "F16"


def write_header(writer: Any, spec: ModelSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)


def _interleaved(values: np.ndarray, num_heads: int | None) -> np.ndarray:
    """Rows of each head as GGUF has them for interleaved RoPE."""
    if num_heads is None:
        return values
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
