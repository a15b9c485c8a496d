"""The sources of a weight update: files, another process's GPU memory (CUDA IPC handles), or a trainer's broadcasts."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, assert_never

import msgspec
import torch

from ringcore.checkpoint.model_files import safetensors_files
from ringcore.errors import InvalidRequestError, ModelLoadError
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.model_executor.tensor_source import GGUFSource, SafetensorsSource
from ringcore.model_executor.weight_update import WeightUpdate
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.loaded_model import LoadedModel
from ringcore.worker.weights.weight_group import BroadcastGroup

__all__ = ["WeightReceiver"]


class FilesSource(msgspec.Struct, frozen=True, tag="files", tag_field="kind", forbid_unknown_fields=True):
    """A safetensors file, or a folder of them; /proc/PID/fd/N for a memfd."""

    path: str


class GroupTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str  # a key of `TORCH_DTYPES`
    shape: list[int]


class IpcTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in another process's GPU memory: the CUDA IPC handle of its storage, as from
    `UntypedStorage._share_cuda_`, and its view of the storage."""

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int  # in elements, from the start of the storage
    gpu: str  # its UUID
    pid: int  # of the process that shares it
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class IpcSource(msgspec.Struct, frozen=True, tag="ipc", tag_field="kind", forbid_unknown_fields=True):
    """Where a name occurs several times, each rank uses the tensor on its own GPU."""

    tensors: list[IpcTensor]


class GroupSource(msgspec.Struct, frozen=True, tag="group", tag_field="kind", forbid_unknown_fields=True):
    """Tensors that rank 0 of the joined group broadcasts in this order."""

    tensors: list[GroupTensor]


class WeightReceiver:
    """One rank's side of a weight update: the update in progress, and the joined broadcast group."""

    def __init__(self) -> None:
        self._update: WeightUpdate | None = None
        self._group: BroadcastGroup | None = None

    @torch.inference_mode()
    def start(self, loaded: LoadedModel) -> None:
        """Starts an update; an unfinished one is abandoned, but what it wrote stays. Raises `InvalidRequestError`."""
        if loaded.tensors is None:
            raise InvalidRequestError(
                "the weights are packed for the CPU's kernels and cannot be replaced; start the engine with "
                "enable_sleep_mode=True",
                field="enable_sleep_mode",
                value=False,
            )
        model = loaded.model
        self._update = WeightUpdate(model.weights(), loaded.tensors, model.elsewhere, self._update)

    @torch.inference_mode()
    def receive(self, source: dict[str, Any], platform: Platform) -> dict[str, float]:
        """Applies one chunk; -> "num_tensors", "num_bytes" written on this rank, "seconds". Raises
        `InvalidRequestError`; tensors before the faulty one stay written."""
        started, update = time.monotonic(), self._started()
        try:
            kind = msgspec.convert(source, FilesSource | IpcSource | GroupSource)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"source: {error}", field="source", value=str(source.get("kind"))) from error
        match kind:
            case FilesSource():
                num_tensors, num_bytes = _from_files(kind.path, update)
            case IpcSource():
                num_tensors, num_bytes = _from_ipc(kind.tensors, update, platform.device)
            case GroupSource():
                num_tensors, num_bytes = self._from_group(kind.tensors, update)
            case _:
                assert_never(kind)
        platform.synchronize()
        return {
            "num_tensors": float(num_tensors),
            "num_bytes": float(num_bytes),
            "seconds": time.monotonic() - started,
        }

    @torch.inference_mode()
    def finish(self, require_all: bool, loaded: LoadedModel, platform: Platform) -> dict[str, float]:
        """-> "num_tensors" of the whole update, "seconds" of this call. require_all: raises `InvalidRequestError` where
        a tensor of the model is missing; the update then stays open for it. A head that drafts is then read from its
        files again: its weights were discarded too."""
        started, update = time.monotonic(), self._started()
        if require_all:
            update.check_complete()
        update.finish()
        loaded.model.refresh()
        if require_all and loaded.reload_head is not None:
            loaded.reload_head()
        platform.synchronize()
        self._update = None
        return {"num_tensors": float(update.num_taken), "seconds": time.monotonic() - started}

    def _started(self) -> WeightUpdate:
        if self._update is None:
            raise InvalidRequestError(
                "no weight update is in progress; call start_weight_update first",
                field="method",
                value="start_weight_update",
            )
        return self._update

    def join(self, group: BroadcastGroup) -> None:
        """Connects, and leaves the previous group."""
        self.leave()
        group.connect()
        self._group = group

    def leave(self) -> None:
        """Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Idempotent."""
        self._update = None
        self.leave()

    def _from_group(self, tensors: Sequence[GroupTensor], update: WeightUpdate) -> tuple[int, int]:
        if self._group is None:
            raise InvalidRequestError(
                "no weight group is joined; call join_weight_group first", field="method", value="join_weight_group"
            )
        try:
            dtypes = [_dtype(tensor.name, tensor.dtype) for tensor in tensors]
            given = zip(tensors, dtypes, strict=True)
            wanted = [update.check(tensor.name, tensor.shape, dtype) for tensor, dtype in given]
            num_bytes = 0
            for tensor, dtype, is_wanted in zip(tensors, dtypes, wanted, strict=True):
                pieces = self._group.receive(tensor.name, tensor.shape, dtype)
                if is_wanted:
                    num_bytes += update.take_rows(tensor.name, pieces)
                else:
                    for _ in pieces:
                        pass
        except BaseException:
            self.leave()  # so that the sender does not wait for this rank
            raise
        return sum(wanted), num_bytes


def _from_files(path: str, update: WeightUpdate) -> tuple[int, int]:
    try:
        is_gguf = path.endswith(".gguf")
        with GGUFSource(path, update.names) if is_gguf else SafetensorsSource(_files(Path(path))) as source:
            return update.read(source)
    except ModelLoadError as error:
        raise InvalidRequestError(f"path={path!r}: {error.message}", field="path", value=path) from error


def _files(path: Path) -> list[str]:
    if path.is_dir():
        files = safetensors_files(path)
        if not files:
            raise ModelLoadError("no safetensors files are in this folder", path=str(path))
        return files
    if not path.is_file():
        raise ModelLoadError(
            "no such file or folder; give a safetensors file, a folder of them or a .gguf file", path=str(path)
        )
    return [str(path)]


def _from_ipc(tensors: Sequence[IpcTensor], update: WeightUpdate, device: torch.device) -> tuple[int, int]:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    left = deque(tensor for tensor in tensors if tensor.gpu == gpu)
    num_tensors = num_bytes = 0
    try:
        _check_reachable(tensors, left, gpu)
        dtypes = {tensor.name: _dtype(tensor.name, tensor.dtype) for tensor in left}
        wanted = {tensor.name for tensor in left if update.check(tensor.name, tensor.shape, dtypes[tensor.name])}
        while left:
            tensor = left.popleft()
            if tensor.name not in wanted:
                _release_handle(tensor, device)
                continue
            opened = _open_handle(tensor, dtypes[tensor.name], device)
            num_tensors, num_bytes = num_tensors + 1, num_bytes + update.take(tensor.name, opened)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # before the owner may overwrite it
            del opened
    finally:
        for tensor in left:
            _release_handle(tensor, device)
    return num_tensors, num_bytes


def _check_reachable(tensors: Sequence[IpcTensor], on_gpu: Collection[IpcTensor], gpu: str | None) -> None:
    names = {tensor.name for tensor in on_gpu}
    for tensor in tensors:
        if tensor.name not in names:
            where = "this rank computes on a CPU" if gpu is None else f"this rank's is {gpu}"
            raise InvalidRequestError(
                f"tensor {tensor.name!r} is on the GPU {tensor.gpu}, {where}; share it on the GPU of every rank, or "
                "from host memory",
                field="tensor",
                value=tensor.name,
            )
        if tensor.pid == os.getpid():
            raise InvalidRequestError(
                f"tensor {tensor.name!r} is shared by this very process, which cannot open its own memory; use the "
                "executor 'multiproc', or give the tensors on the host",
                field="tensor",
                value=tensor.name,
            )


def _open_handle(tensor: IpcTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A view of the other process's memory; the last view closes the handle and drops the owner's reference."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        tensor.handle,
        tensor.storage_bytes,
        tensor.storage_offset_bytes,
        tensor.ref_counter,
        tensor.ref_counter_offset,
        tensor.event,
        tensor.event_sync_required,
    )
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, tensor.offset, tensor.shape, tensor.stride)


def _release_handle(tensor: IpcTensor, device: torch.device) -> None:
    """Decrements the owner's reference count of an unopened handle: each handle is opened or released exactly once."""
    if device.type == "cuda":
        torch.UntypedStorage._release_ipc_counter_cuda(tensor.ref_counter, tensor.ref_counter_offset)


def _dtype(name: str, dtype: str) -> torch.dtype:
    if dtype not in TORCH_DTYPES:
        raise InvalidRequestError(
            f"tensor {name!r} is {dtype}; give it in {', '.join(TORCH_DTYPES)}", field="tensor", value=name
        )
    return TORCH_DTYPES[dtype]
