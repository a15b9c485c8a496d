"""The fields of config.json that every kind of spec has."""

from __future__ import annotations

from pathlib import Path

from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_file import path_exists
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.safetensors_header import DTYPE_NAMES, TensorIndex

__all__ = ["read_bos_token_id", "read_dtype", "read_eos_token_ids"]

_DTYPES = ("float32", "float16", "bfloat16")  # that a model is computed in


def read_dtype(config: Metadata, files: ModelFiles) -> str:
    """From config.json (`torch_dtype` before transformers 5), else the dtype of most tensors."""
    for key in ("dtype", "torch_dtype"):
        if key in config:
            name = config.text(key).removeprefix("torch.")
            if name not in _DTYPES:
                raise config.error(key, f"is {name!r}; float32, float16 and bfloat16 are known")
            return name
    names = [DTYPE_NAMES.get(entry.dtype) for entry in TensorIndex(files.weight_files).values()]
    found = [name for name in names if name in _DTYPES]
    return max(set(found), key=found.count) if found else "float32"


def read_bos_token_id(config: Metadata) -> int | None:
    value = config.get("bos_token_id")
    if isinstance(value, list):  # a few checkpoints have a list of one
        value = value[0] if value else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise config.error("bos_token_id", f"is {value!r}, a token id is needed")
    return value


def read_eos_token_ids(config: Metadata, files: ModelFiles) -> list[int]:
    """The ids that end a completion: those of generation_config.json, then those of config.json."""
    sources = [config]
    generation = Path(files.path) / "generation_config.json"
    if path_exists(generation):
        sources.insert(0, Metadata(read_json(generation), str(generation)))
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise source.error("eos_token_id", f"is {value!r}, a token id or a list of them is needed")
            if token_id >= 0 and token_id not in ids:  # some files have -1 for none
                ids.append(token_id)
    return ids
