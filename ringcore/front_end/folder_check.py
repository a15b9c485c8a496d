"""Compares a checkpoint with transformers' model before a worker starts, in a process that may import torch.

Nearly all of its time are imports. So it is noted in the user's cache that a configuration and the names and shapes of
its tensors have passed, and they are not looked at again with the same code and the same transformers.
"""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from ringcore.checkpoint import ModelFiles, TensorIndex, TransformersSpec
from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.config.options import ModelConfig
from ringcore.errors import RingcoreError
from ringcore.executor.job_process import JobProcess
from ringcore.protocol.codec import encode_start, encoder
from ringcore.protocol.folder_check import CHANNEL, ENTRY, FolderCheckStart

__all__ = ["folder_check"]

_TIMEOUT_S = 600.0  # imports from a slow disk; longer means that it hangs


@contextmanager
def folder_check(model: ModelConfig, cache: str) -> Iterator[None]:
    """Runs beside the block, and is waited for at its end. Raises `ModelLoadError` for a tensor that is missing, of
    another shape or without a place, and where the head that is to draft cannot; does nothing for a model with a class
    here, or with dummy weights.

    cache: a folder of this check alone, which need not exist.
    """
    spec = model.spec
    if not isinstance(spec, TransformersSpec) or model.files.kind == "dummy":
        yield
        return
    start = FolderCheckStart(spec, model.files, model.draft_head)
    passed = Path(cache, _key(start))
    if passed.exists():
        yield
        return
    process = JobProcess("folder check", ENTRY, encode_start(start), CHANNEL)
    try:
        yield
        _wait(process)
    finally:
        process.kill().terminate()
    with suppress(OSError):  # a cache that cannot be written costs time alone
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _key(start: FolderCheckStart) -> str:
    """All that the result depends on."""
    head = start.head and [start.head.layer_name, start.head.layer]
    found = [start.spec.config, head, _found(start.files), *map(version, ("transformers", "torch", "gguf"))]
    key = hashlib.sha256(encoder().encode(found))
    code = Path(__file__).parent.parent
    for folder in ("model_executor/models/transformers", "model_executor", "checkpoint", "families"):
        for file in sorted(code.glob(f"{folder}/*.py")):
            key.update(file.read_bytes())
    return key.hexdigest()


def _found(files: ModelFiles) -> list[object]:
    """What the headers of the files say that is compared: names and shapes, and of which architecture GGUF's are."""
    if files.kind == "safetensors":
        return [files.kind, {name: entry.shape for name, entry in TensorIndex(files.weight_files).items()}]
    header = read_gguf_header(files.weight_files[0])
    shapes = {name: info.shape for name, info in header.tensors.items()}
    return [files.kind, header.metadata.get("general.architecture"), shapes]


def _wait(process: JobProcess) -> None:
    poll, deadline = select.poll(), time.monotonic() + _TIMEOUT_S
    poll.register(process.channel, select.POLLIN)
    poll.register(process.child.pidfd, select.POLLIN)
    while not process.poll_ready():
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise RingcoreError(f"the check of the model's files took longer than {_TIMEOUT_S} s")
        if not process.child.is_alive() and not process.poll_ready():
            raise process.child.dead_error()
