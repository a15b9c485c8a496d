"""Weight updates of a running engine, on the sender's side, for instance a trainer.

    with weight_source(model.state_dict()) as source:        # or a path; the host's tensors, or a GPU's
        llm.update_weights(source)

Tensors have a checkpoint's names and are not sharded. torch is imported lazily, by name: a front end imports this
module too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from ringcore.checkpoint.safetensors_header import DTYPE_NAMES
from ringcore.errors import InvalidRequestError
from ringcore.executor.array_bytes import bytes_of_tensor, torch_name
from ringcore.executor.ring_memory import seal, shared_memory

__all__ = ["SharedTensors", "WeightGroup", "ipc_handles", "weight_source"]

_CODES = {name: code for code, name in DTYPE_NAMES.items()}  # by the dtype's name in torch
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NUM_WRITERS = 8  # threads: a few saturate the host's memory bandwidth


@contextmanager
def weight_source(weights: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A source for `update_weights`, valid inside the context: of a safetensors file, a folder of them, or of torch
    tensors by name, all on the host or all on GPUs.

    Copies host tensors into shared memory; exports GPU tensors as IPC handles, which the rank on that GPU reads in
    place, so that they must not change meanwhile. Raises `InvalidRequestError`, and `CapacityError` if the host's
    shared memory is too small.
    """
    if isinstance(weights, str | os.PathLike):
        yield {"kind": "files", "path": os.path.abspath(weights)}
        return
    kinds = {_checked(name, tensor).device.type for name, tensor in weights.items()}
    if not kinds <= {"cpu"} and kinds != {"cuda"}:
        raise InvalidRequestError(
            f"the tensors are on {' and '.join(sorted(kinds))}; give all on the host or all on GPUs, in one call each",
            field="weights",
            value=sorted(kinds),
        )
    if kinds == {"cuda"}:
        try:
            yield {"kind": "ipc", "tensors": ipc_handles(weights)}
        finally:
            _torch().cuda.ipc_collect()  # frees memory that receivers have released
        return
    with SharedTensors(weights) as shared:
        yield {"kind": "files", "path": shared.path}


class SharedTensors(AbstractContextManager["SharedTensors"]):
    """Tensors in memory that other processes of this user can read, in the layout of a safetensors file.

    A memfd without a name: freed once the context or this process has ended and all readers have closed it. Sealed
    against writes if the kernel allows it.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Copies the tensors. Raises `InvalidRequestError` for an unsupported dtype, and `CapacityError`."""
        header, offsets, num_bytes = _layout(tensors)
        self._fd = shared_memory("weights", num_bytes)
        try:
            _write(self._fd, 0, memoryview(header))
            with ThreadPoolExecutor(min(_NUM_WRITERS, len(os.sched_getaffinity(0)))) as threads:
                for _ in threads.map(self._write_tensor, offsets.values(), tensors.values()):
                    pass
            self._seal()
        except BaseException:
            self.close()
            raise

    def _seal(self) -> None:
        try:
            seal(self._fd, _SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY:  # the kernel holds a page, to migrate or to age it: it stays unsealed
                raise

    def _write_tensor(self, offset: int, tensor: Any) -> None:
        _write(self._fd, offset, bytes_of_tensor(tensor, _torch()))

    @property
    def path(self) -> str:
        """The path of the memory for other processes of this host and this one."""
        if self._fd < 0:
            raise InvalidRequestError("the shared tensors are closed", field="path", value=None)
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _layout(tensors: Mapping[str, Any]) -> tuple[bytes, dict[str, int], int]:
    """(the header with its length, where each tensor begins in the file, the file's bytes), by the format's
    specification: contiguous data after a header that ends at a multiple of 8."""
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        _checked(name, tensor)
        end = begin + tensor.numel() * tensor.element_size()
        dtype = _CODES[torch_name(tensor.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return header, offsets, len(header) + begin


def _write(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def ipc_handles(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """CUDA IPC handles of GPU tensors, the "tensors" of a source of kind "ipc", as builtin values. Another process can
    open each once, while this process keeps the tensor. Raises `InvalidRequestError`."""
    return [_ipc_handle(name, _checked(name, tensor).detach()) for name, tensor in tensors.items()]


def _ipc_handle(name: str, tensor: Any) -> dict[str, Any]:
    if tensor.device.type != "cuda" or not tensor.numel():
        raise _refused(name, f"has no memory on a GPU: it is on {tensor.device}, of shape {list(tensor.shape)}")
    # As `torch.multiprocessing` shares it. The first item is the device's index, which may differ in the receiver.
    _, handle, *storage = tensor.untyped_storage()._share_cuda_()
    storage_bytes, storage_offset_bytes, ref_counter, ref_counter_offset, event, event_sync_required = storage
    return {
        "name": name,
        "dtype": torch_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "gpu": str(_torch().cuda.get_device_properties(tensor.device).uuid),
        "pid": os.getpid(),
        "handle": handle,
        "storage_bytes": storage_bytes,
        "storage_offset_bytes": storage_offset_bytes,
        "ref_counter": ref_counter,
        "ref_counter_offset": ref_counter_offset,
        "event": event,
        "event_sync_required": bool(event_sync_required),
    }


class WeightGroup(AbstractContextManager["WeightGroup"]):
    """Rank 0 of a group that the workers of an engine join: a trainer that broadcasts its weights.

        group = WeightGroup("127.0.0.1", 0, world_size=1 + number_of_workers)
        # while `group.connect()` runs here, elsewhere (another thread will do):
        llm.collective_rpc("join_weight_group", ("127.0.0.1", group.port, world_size, 1, "nccl", 60.0))
        # and so with each chunk: `group.broadcast(tensors)` here, and elsewhere
        llm.update_weights({"kind": "group", "tensors": group.describe(tensors)})

    Any process that reaches the port can join. If a rank is lost, the group is closed and the next call raises.
    """

    def __init__(
        self, address: str, port: int, world_size: int, backend: str = "nccl", timeout_s: float = 60.0
    ) -> None:
        """Listens at `address`, one of this host's, and `port`, 0 for any; returns at once.

        world_size: this process and all workers. backend: "nccl" sends from the current GPU, which must be none of the
        workers' (on theirs, give the tensors to `update_weights` instead); "gloo" sends from the host.
        timeout_s: of the rendezvous, and of each chunk of a tensor. Raises `InvalidRequestError`.
        """
        torch = _torch()
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        group = import_module("ringcore.worker.weights.weight_group")
        self._group = group.BroadcastGroup(address, port, world_size, 0, backend, timeout_s, device)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._group.port)

    def connect(self) -> None:
        """Returns when all workers have joined; `broadcast` does it too. Raises `InvalidRequestError`."""
        self._group.connect()

    @staticmethod
    def describe(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The "tensors" of the source of kind "group" by which the workers know what `broadcast` sends."""
        return [
            {"name": name, "dtype": torch_name(_checked(name, tensor).dtype), "shape": list(tensor.shape)}
            for name, tensor in tensors.items()
        ]

    def broadcast(self, tensors: Mapping[str, Any]) -> None:
        """Sends them in their order; returns when they are sent. Raises `InvalidRequestError`."""
        for name, tensor in tensors.items():
            _checked(name, tensor)
        self._group.send(tensors)

    def close(self) -> None:
        """Idempotent."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(name: str, tensor: Any) -> Any:
    """The tensor, if it can be a weight. Raises `InvalidRequestError`."""
    if not isinstance(tensor, _torch().Tensor):
        raise _refused(name, f"is a {type(tensor).__name__}; give a torch tensor")
    if torch_name(tensor.dtype) not in _CODES:
        raise _refused(name, f"is {torch_name(tensor.dtype)}; give it in {', '.join(_CODES)}")
    if not tensor.ndim:
        raise _refused(name, "is a single number; no weight is")
    return tensor


def _refused(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"tensor {name!r} {reason}", field="weights", value=name)


def _torch() -> Any:
    return import_module("torch")
