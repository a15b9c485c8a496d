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

from ringcore.checkpoint import TensorIndex, TransformersSpec
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
    another shape or without a place; does nothing for a model with a class here, or with dummy weights.

    cache: a folder of this check alone, which need not exist.
    """
    spec = model.spec
    if not isinstance(spec, TransformersSpec) or not spec.weight_files or (passed := Path(cache, _key(spec))).exists():
        yield
        return
    process = JobProcess("folder check", ENTRY, encode_start(FolderCheckStart(spec, model.files)), CHANNEL)
    try:
        yield
        _wait(process)
    finally:
        process.kill().terminate()
    with suppress(OSError):  # a cache that cannot be written costs time alone
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _key(spec: TransformersSpec) -> str:
    """All that the result depends on."""
    shapes = {name: entry.shape for name, entry in TensorIndex(spec.weight_files).items()}
    key = hashlib.sha256(encoder().encode([spec.config, shapes, version("transformers"), version("torch")]))
    code = Path(__file__).parent.parent
    for file in (*sorted(code.glob("model_executor/models/transformers/*.py")), *sorted(code.glob("checkpoint/*.py"))):
        key.update(file.read_bytes())
    return key.hexdigest()


def _wait(process: JobProcess) -> None:
    poll, deadline = select.poll(), time.monotonic() + _TIMEOUT_S
    poll.register(process.channel, select.POLLIN)
    poll.register(process.child.pidfd, select.POLLIN)
    while not process.poll_ready():
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise RingcoreError(f"the check of the model's files took longer than {_TIMEOUT_S} s")
        if not process.child.is_alive() and not process.poll_ready():
            raise process.child.dead_error()
