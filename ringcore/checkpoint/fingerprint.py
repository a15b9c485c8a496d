"""A name for a model's contents, equal in every process: KV that outlives a process must never meet another model."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from ringcore.checkpoint.model_files import ModelFiles

__all__ = ["model_fingerprint"]

_SAMPLE_BYTES, _NUM_SAMPLES = 64 << 10, 32


def model_fingerprint(files: ModelFiles, seed: int) -> bytes:
    """32 bytes over the configuration, and of each file of weights its size, time of change and samples, the first and
    the last bytes among them. Reading all of the weights would take as long as loading them. seed: of dummy weights.

    The folder's path is not in it. A copy that does not keep the time of change has another name: it finds nothing, as
    a new model.
    """
    digest = blake2b(digest_size=32)
    digest.update(f"{files.kind} {seed if files.kind == 'dummy' else ''}".encode())
    if files.config_path is not None:
        digest.update(Path(files.config_path).read_bytes())
    for path in sorted(files.weight_files):
        with open(path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            digest.update(f"\n{os.path.basename(path)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            last = max(stat.st_size - _SAMPLE_BYTES, 0)
            for at in sorted({last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)}):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
    return digest.digest()
