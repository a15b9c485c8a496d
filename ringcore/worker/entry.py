"""The worker's entry point, which an executor loads by name in the worker process: the only link between the columns.

torch is imported when a worker is created, not with this module, so that the GPU's context is created concurrently,
and processes that compile kernels import it too, and one reads names in transformers' files.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.worker.start_up.compilers import begin_compilers, drop_compilers
from ringcore.worker.start_up.gpu_context import begin_gpu_context
from ringcore.worker.start_up.import_names import begin_reading_names

if TYPE_CHECKING:
    from ringcore.worker.worker import Worker

__all__ = ["create_worker"]


def create_worker(config: EngineConfig, rank: int, rendezvous: str | None) -> Worker:
    """The worker of one rank, with the user's `worker_extension` mixed in; no stage has run yet.

    Raises `ConfigError` where the extension cannot be found or mixed in.
    """
    if config.device.device != "cpu":
        begin_gpu_context(config.parallel.layout.local_rank(rank))
        begin_compilers(config.parallel.layout.num_local_ranks(rank))
    begin_reading_names(config, rank)
    import torch

    if config.device.device != "cpu" and not torch.cuda.is_available():  # a driver, and no GPU
        drop_compilers()
    if "OMP_NUM_THREADS" not in os.environ:  # else torch has applied it
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // config.parallel.layout.num_local_ranks(rank)))
    return _worker_class(config.parallel.worker_extension)(config, rank, rendezvous)


def _worker_class(extension: str | None) -> type[Worker]:
    from ringcore.worker.worker import Worker

    if extension is None:
        return Worker
    module_name, _, class_name = extension.rpartition(".")
    if not module_name:
        raise _bad_extension(extension, "it has no module; give 'module.Class'")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise _bad_extension(extension, f"importing {module_name} raised {type(error).__name__}: {error}") from error
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        raise _bad_extension(extension, f"{module_name} has no class {class_name}")
    try:
        return type("ExtendedWorker", (found, Worker), {})
    except TypeError as error:
        raise _bad_extension(extension, f"it cannot be mixed into the worker: {error}") from error


def _bad_extension(extension: str, reason: str) -> ConfigError:
    return ConfigError(f"worker_extension={extension!r}: {reason}", option="worker_extension", value=extension)
