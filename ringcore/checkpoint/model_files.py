"""Finds a model's files and checks, before any process starts, that they are complete."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import Any, Literal

import msgspec

from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.checkpoint.metadata import read_json
from ringcore.checkpoint.model_file import path_exists
from ringcore.checkpoint.safetensors_header import TensorIndex
from ringcore.errors import ModelLoadError

__all__ = ["ModelFiles", "find_model", "find_tokenizer", "safetensors_files"]

INDEX_MAX_BYTES = 64 << 20  # of model.safetensors.index.json: one line per tensor
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]


class ModelFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a model. All paths are absolute.

    `path` is the folder or the .gguf file that was found; `config_path` is None where the configuration is in a
    GGUF file; `weight_files` is empty for dummy weights.
    """

    kind: Literal["safetensors", "gguf", "dummy"]
    path: str
    config_path: str | None
    weight_files: list[str]
    tokenizer_path: str  # a folder, or a .gguf file


def find_model(model: str | os.PathLike[str], load_format: str = "auto") -> ModelFiles:
    """Finds a model given as a folder, a .gguf file or a hub id.

    `load_format` "safetensors" or "gguf" asks for that kind, "auto" takes the existing one (safetensors first),
    "dummy" needs only the configuration. Raises `ModelLoadError` where a file is missing, broken or unsupported.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if os.path.isdir(path):  # Path.is_dir raises without permission
        return _in_folder(path.absolute(), load_format)
    if path_exists(path):
        return _single_file(path.absolute(), load_format)
    if isinstance(model, str) and _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _in_folder(_download(name, load_format), load_format)
    kind = "file" if name.endswith(".gguf") else "folder"
    raise ModelLoadError(f"model {name!r}: no such {kind}; give a model folder, a .gguf file or a hub id", path=name)


def find_tokenizer(tokenizer: str | os.PathLike[str]) -> Path:
    """The folder or .gguf file of a tokenizer given as either of them, as a tokenizer.json or as a hub id."""
    name = os.fspath(tokenizer)
    path = Path(name).expanduser()
    if path.name == "tokenizer.json" and path_exists(path):
        path = path.parent
    if os.path.isdir(path) or (path.suffix == ".gguf" and path_exists(path)):
        return path.absolute()
    if not path_exists(path) and _HUB_ID.fullmatch(name) and not name.endswith((".gguf", ".json")):
        return _download(name, "dummy")
    raise ModelLoadError(
        f"tokenizer {name!r}: give a folder with a tokenizer.json, a .gguf file or a hub id; none is there", path=name
    )


def _bad(path: Path, what: str, **details: Any) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what}", path=str(path), **details)


def _single_file(path: Path, load_format: str) -> ModelFiles:
    if path.suffix != ".gguf":
        raise _bad(path, "is no folder and no .gguf file; give the model's folder")
    if load_format == "safetensors":
        raise _bad(path, "is a .gguf file, but load_format is 'safetensors'; give load_format 'auto' or 'gguf'")
    read_gguf_header(path)
    dummy = load_format == "dummy"
    return ModelFiles("dummy" if dummy else "gguf", str(path), None, [] if dummy else [str(path)], str(path))


def _in_folder(folder: Path, load_format: str) -> ModelFiles:
    config = folder / "config.json"
    gguf_files = sorted(folder.glob("*.gguf"))
    if load_format == "gguf" or (gguf_files and not path_exists(config)):
        if len(gguf_files) != 1:
            names = ", ".join(file.name for file in gguf_files) or "none"
            raise _bad(folder, f"one .gguf file is needed, found {names}; give the path of the file")
        return _single_file(gguf_files[0], load_format)
    if not path_exists(config):
        raise _bad(folder, "config.json is missing; give a folder in the Hugging Face layout, or a .gguf file")
    if load_format == "dummy":
        return ModelFiles("dummy", str(folder), str(config), [], str(folder))
    weights = safetensors_files(folder)
    if not weights and gguf_files and load_format == "auto":
        return _in_folder(folder, "gguf")
    if not weights:
        raise _no_weights(folder)
    return ModelFiles("safetensors", str(folder), str(config), weights, str(folder))


def _no_weights(folder: Path) -> ModelLoadError:
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        return _bad(
            folder,
            f"has weights only as {pickled[0]}, which can run code when it is read: safetensors only; "
            "convert it with transformers' save_pretrained",
        )
    return _bad(folder, "has no weights: model.safetensors or model.safetensors.index.json is missing")


def safetensors_files(folder: Path) -> list[str]:
    """The weight files, each checked against its header; empty if there are none. Raises `ModelLoadError`."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path_exists(single):
        files = [str(single)]
    elif path_exists(index):
        return _indexed_files(folder, index)
    else:
        files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
        if len(files) > 1:
            raise _bad(folder, f"has {len(files)} .safetensors files but no {index.name} that names them")
    TensorIndex(files)
    return files


def _indexed_files(folder: Path, index: Path) -> list[str]:
    weight_map = read_json(index, INDEX_MAX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(index, "field 'weight_map' is missing or empty")
    shards: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise _bad(index, f"names {shard!r} for {tensor!r}: a .safetensors file beside it is needed", tensor=tensor)
        if shard not in shards and not path_exists(folder / shard):
            raise _bad(folder, f"shard {shard} is missing; {index.name} names it for {tensor!r}", tensor=tensor)
        shards[shard] = str(folder / shard)
    files = sorted(shards.values())
    tensors = TensorIndex(files)
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].file != shards[shard]:
            raise _bad(folder / shard, f"has no tensor {tensor!r}, though {index.name} says so", tensor=tensor)
    return files


def _download(hub_id: str, load_format: str) -> Path:
    """The folder of a hub id, downloaded unless huggingface_hub has it in its cache."""
    if load_format == "gguf":
        raise ModelLoadError(
            f"model {hub_id!r}: no such file; a hub repository may hold many .gguf files: download one, give its path",
            path=hub_id,
        )
    from huggingface_hub import snapshot_download

    patterns = _HUB_FILES if load_format == "dummy" else [*_HUB_FILES, "*.safetensors"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the client raises many types, also those of network libraries
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ModelLoadError(
            f"model {hub_id!r}: no such folder here, and as a hub id it cannot be downloaded: "
            f"{type(error).__name__}: {reason[:300]}; check the name and the network, or give a model folder",
            path=hub_id,
        ) from error
