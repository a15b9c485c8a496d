"""What must be equal for a parked engine to do in place of a new one, and what differs where it does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ringcore.checkpoint.fingerprint import model_fingerprint
from ringcore.config import EngineConfig
from ringcore.host.file_names import with_utf8_names
from ringcore.protocol.parking import ParkedKey
from ringcore.version import __version__

__all__ = ["differences", "parked_key"]

_PACKAGES = ("torch", "transformers", "triton")
# Variables that decide what an engine's processes do: they have those of the program that started them. None of them
# is a secret, for a refusal names their values.
_PREFIXES = (
    *("CUDA", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_"),
    *("ATEN_", "DNNL_", "ONEDNN_", "LD_", "MALLOC_", "TRANSFORMERS_"),
)
_PATHS = (
    *(("parallel", "admin_keys"), ("parallel", "join_keys")),
    *(("device", "sleep_directory"), ("cache", "host_kv_cache_dir")),
)
_MAX_CHARS = 60


def parked_key(config: EngineConfig) -> ParkedKey:
    """Reads samples of the model's files, and when each module of this package was changed."""
    return ParkedKey(
        options=_options(config),
        model=model_fingerprint(config.model.files, config.model.seed),
        versions={"ringcore": __version__, "code": _code(), "python": sys.version, **_versions()},
        environment=_environment(),
    )


def _options(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """With absolute paths, as a relative one is another file elsewhere; `files` has those of model and tokenizer."""
    found: dict[str, dict[str, Any]] = with_utf8_names(msgspec.to_builtins(config))
    for part, name in (("model", "model"), ("model", "tokenizer"), ("parallel", "start_from")):
        del found[part][name]
    for part, name in _PATHS:
        given = found[part][name]
        found[part][name] = None if given is None else os.path.abspath(given)
    return found


def _code() -> str:
    """The folder of this package, and its newest module: an update in place is other code of the same version."""
    package = Path(__file__).parents[2]
    newest_ns, num_files = 0, 0
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            newest_ns = max(newest_ns, os.stat(os.path.join(folder, name)).st_mtime_ns)
        num_files += len(names)
    return f"{num_files} files in {package}, the newest of {newest_ns}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _environment() -> dict[str, str]:
    chosen = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    found: dict[str, str] = with_utf8_names(chosen | {"processor cores": cores})
    return found


def differences(parked: ParkedKey, wanted: ParkedKey) -> list[str]:
    """In words, an entry for each; empty where an engine of one does for the other."""
    found = []
    for part in wanted.options.keys() | parked.options.keys():
        found += _differing(parked.options.get(part, {}), wanted.options.get(part, {}))
    if parked.model != wanted.model:
        found.append("the model's files were changed")
    found += _differing(parked.versions, wanted.versions)
    found += _differing(parked.environment, wanted.environment)
    return sorted(found)


def _differing(parked: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    names = parked.keys() | wanted.keys()
    return [
        f"{name} is {_shown(parked, name)} there and {_shown(wanted, name)} here"
        for name in names
        if parked.get(name) != wanted.get(name)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not set"
    text = repr(values[name])
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
