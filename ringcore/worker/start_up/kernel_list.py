"""The kernels that a configuration launches on a device, as an earlier start found them.

A list is data: a kernel is looked up by its name in this package, and lists are of the contents of all its sources.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from triton import JITFunction

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.host.cache_folder import KERNELS, TILES, our_cache_folder
from ringcore.host.file_names import with_utf8_names
from ringcore.host.measurements import Measurements
from ringcore.kernels.launch.cuda_kernel import CudaKernel
from ringcore.kernels.launch.precompile import Variant

__all__ = ["KernelList"]

_WHAT = "kernels"  # is what a record holds
_PACKAGE = Path(__file__).parents[2]
_KERNELS = "ringcore.kernels."


class KernelList:
    """What is kept under one key."""

    def __init__(self, folder: Path, key: Mapping[str, str]) -> None:
        self._lists, self._key = Measurements(folder), dict(key)

    @classmethod
    def of(cls, config: EngineConfig, tp: TensorParallel, dtype: str, device: torch.device) -> KernelList:
        """That of this rank. dtype: the model's compute dtype."""
        facts = {"config": _digest(msgspec.to_builtins(config)), "rank": f"{tp.rank} of {tp.size}", "dtype": dtype}
        if config.device.kernel_autotune:  # what is searched changes the kernels
            facts["tiles"] = str(Measurements(Path(our_cache_folder(TILES))).newest())
        facts |= _device_facts(device) | {"sources": _digest([*_sources()])}
        return cls(Path(our_cache_folder(KERNELS)), facts)

    def exists(self) -> bool:
        """Whether there is a list, which need not be one that can be read."""
        return self._lists.exists(self._key)

    def read(self) -> list[Variant] | None:
        """None where there is no list, or one that does not fit the kernels that there are."""
        return self._lists.read(self._key, _WHAT, _decode)

    def write(self, variants: Sequence[Variant]) -> None:
        """Raises OSError."""
        self._lists.write(self._key, _WHAT, [_encode(variant) for variant in variants])


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(with_utf8_names(value), order="deterministic")).hexdigest()


def _device_facts(device: torch.device) -> dict[str, str]:
    """The GPU, and what compiles and launches the kernels."""
    is_cuda = device.type == "cuda"
    facts = {"device": torch.cuda.get_device_name(device) if is_cuda else str(device), "torch": torch.__version__}
    facts["transformers"] = importlib.metadata.version("transformers")
    capability = torch.cuda.get_device_capability(device) if is_cuda else ()
    return facts | {"triton": triton.__version__, "capability": str(capability)}


def _sources() -> Iterator[tuple[str, int, int | bytes]]:
    """(Path, bytes, time of change) of each source file of this package, of kernels their contents in its place."""
    for path in sorted(path for kind in ("py", "cu", "cuh") for path in _PACKAGE.rglob(f"*.{kind}")):
        status, name = path.stat(), str(path.relative_to(_PACKAGE))
        is_kernels = name.startswith("kernels/")
        yield name, status.st_size, hashlib.sha256(path.read_bytes()).digest() if is_kernels else status.st_mtime_ns


def _encode(variant: Variant) -> dict[str, str]:
    kernel = variant.kernel
    place = {"module": kernel.fn.__module__, "name": kernel.fn.__name__}
    return place | {"cache_key": kernel.cache_key, "specialization": variant.specialization}


def _decode(content: Any) -> list[Variant]:
    variants = [Variant(_kernel(one), one["specialization"]) for one in content]
    if not variants or not all(isinstance(json.loads(one.specialization), dict) for one in variants):
        raise ValueError(content)
    return variants


def _kernel(one: Mapping[str, str]) -> Any:
    """Raises ValueError where there is no such kernel. It gets the list's hash, for which Triton would parse it and all
    that it calls."""
    module, name, key = str(one["module"]), str(one["name"]), one["cache_key"]
    if not module.startswith(_KERNELS):  # nothing else is imported
        raise ValueError(f"{module} has no kernels")
    try:
        kernel = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module} has no {name}") from error
    if not isinstance(kernel, JITFunction | CudaKernel) or not isinstance(key, str):
        raise ValueError(f"{module}.{name} with {key!r} is no kernel with its hash")
    if kernel.hash is None:
        kernel.hash = key
    return kernel
