"""Writes a transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_blocks import encoded

QUANTIZED = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
K_QUANTS = ("Q4_K", "Q6_K")


def write_gguf(path: Path, hf: Any, architecture: str, kind: str = "F32", skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Writes matrices as `kind`, vectors as F32. Returns what a reader should see: HF name -> float32 array."""
    config, expected = hf.config, {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope, gemma3 = config.rope_parameters, architecture == "gemma3"
    if gemma3:
        writer.add_sliding_window(config.sliding_window)
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array("gemma3.attention.sliding_window_pattern", slides)
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in hf.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        turned = heads if architecture == "llama" else None
        shift = 1 if gemma3 and name.endswith("norm.weight") else 0  # the file has 1 + weight
        raw, kept = _encode(_interleave(tensor.numpy() + shift, turned), kind if tensor.ndim == 2 else "F32")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", raw, raw_dtype=_type(kind if tensor.ndim == 2 else "F32"))
        expected[name] = _deinterleave(kept, turned) - shift
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def _encode(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes or floats as the file has them, the values that come back)."""
    raw = encoded(values, kind)
    return raw, gguf.quants.dequantize(raw, _type(kind)).astype(np.float32).reshape(values.shape)


def _interleave(values: np.ndarray, heads: int | None) -> np.ndarray:
    if heads is None:
        return values
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _deinterleave(values: np.ndarray, heads: int | None) -> np.ndarray:
    if heads is None:
        return values
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
