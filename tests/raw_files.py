"""Model files made byte by byte, so that each can be broken in one place."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
FORMATS = dict(zip(SCALARS, "BbHhIif?Qqd", strict=True))
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: str, item: Any) -> bytes:
    """A metadata value with its type: a kind of `SCALARS`, "str", or "[kind]" for an array of it."""
    if kind == "str":
        return struct.pack("<I", 8) + string(item)
    if kind.startswith("["):
        inner = [value(kind[1:-1], one) for one in item]
        head = struct.unpack("<I", value(kind[1:-1], [] if kind[1] == "[" else "" if kind[1:-1] == "str" else 0)[:4])[0]
        return struct.pack("<IIQ", 9, head, len(item)) + b"".join(one[4:] for one in inner)
    return struct.pack("<I", SCALARS[kind]) + struct.pack(f"<{FORMATS[kind]}", item)


def gguf_bytes(
    metadata: list[tuple[str, str, Any]],
    tensors: list[tuple[str, tuple[int, ...], int, int]] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """`tensors` are (name, shape as numpy has it, ggml type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, kind, item in metadata:
        out += string(key) + value(kind, item)
    for name, shape, kind, offset in tensors:
        dims = b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
        out += string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)
    return out + b"\0" * (-len(out) % alignment) + data


def tiny_metadata(architecture: str = "llama", **changed: tuple[str, Any] | None) -> list[tuple[str, str, Any]]:
    """A model of 2 layers, 4 query and 2 KV heads of 8. `changed` keys have "__" for "." and None to leave one out."""
    own = {
        "block_count": ("u32", 2),
        "context_length": ("u32", 64),
        "embedding_length": ("u32", 32),
        "feed_forward_length": ("u32", 48),
        "attention.head_count": ("u32", 4),
        "attention.head_count_kv": ("u32", 2),
        "attention.layer_norm_rms_epsilon": ("f32", 1e-6),
        "rope.freq_base": ("f32", 500000.0),
    }
    own.update({key.replace("__", "."): item for key, item in changed.items()})
    pairs = [(f"{architecture}.{key}", *item) for key, item in own.items() if item is not None]
    return [("general.architecture", "str", architecture), *pairs]


def tiny_gguf(path: Path, metadata: list[tuple[str, str, Any]], arrays: dict[str, np.ndarray]) -> Path:
    """A GGUF file of float32 tensors by their GGUF names."""
    tensors, data = [], b""
    for name, array in arrays.items():
        tensors.append((name, array.shape, F32, len(data)))
        data += array.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    path.write_bytes(gguf_bytes(metadata, tensors, data))
    return path


def phi3_gguf(path: Path, changed: dict[str, np.ndarray | None] | None = None) -> Path:
    """A GGUF file of an architecture that transformers computes, of zeros, 2 layers with the sizes of `tiny_metadata`
    and 128 tokens. changed: tensors in place of its own; None: left out."""
    layer = {"attn_qkv": (64, 32), "attn_output": (32, 32), "ffn_up": (96, 32), "ffn_down": (32, 48)}
    layer |= {"attn_norm": (32,), "ffn_norm": (32,)}
    shapes = {"token_embd": (128, 32), "output_norm": (32,), "output": (128, 32)}
    shapes |= {f"blk.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    arrays = {f"{name}.weight": np.zeros(shape) for name, shape in shapes.items()} | (changed or {})
    return tiny_gguf(path, tiny_metadata("phi3"), {name: array for name, array in arrays.items() if array is not None})


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_file(path: Path, **arrays: np.ndarray) -> Path:
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(safetensors_bytes(header, data))
    return path


LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def model_folder(folder: Path, **changed: Any) -> Path:
    """A folder with config.json (`LLAMA_CONFIG` with `changed` in it) and one small safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | changed))
    safetensors_file(folder / "model.safetensors", a=np.arange(6.0).reshape(2, 3))
    return folder
