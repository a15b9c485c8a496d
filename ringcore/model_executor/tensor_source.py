"""Sources of a checkpoint's tensors: safetensors files, a GGUF file, or a seed (dummy weights)."""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from ringcore.checkpoint import ModelFiles, TensorEntry, TensorIndex
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.quantization import GgufFormat
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.staging import Staging
from ringcore.model_executor.weight import CHECKPOINT_DTYPES, Uniform, WeightPart, is_readable

__all__ = ["GGUFSource", "SafetensorsSource", "TensorSource", "open_source"]


class TensorSource(ABC):
    """The tensors of one checkpoint under their Hugging Face names."""

    shapes: Mapping[str, tuple[int, ...]] | None  # None: it has any tensor in any shape
    kinds: Mapping[str, str] = MappingProxyType({})  # of those that fill a part with `blocks`, the GGML type

    @abstractmethod
    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    @abstractmethod
    def read(self, part: WeightPart, init: Uniform, out: torch.Tensor) -> None:
        """Copies the slice that `part` describes, in its order, into `out`, a tensor or view of its shape. On a GPU, on
        the current stream and perhaps not yet complete when it returns. Thread-safe.

        `out` may be on any device, and of any dtype that the tensor's can fill (`is_readable`). Raises `ModelLoadError`
        if the file does not hold the data.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases files and threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(files: ModelFiles, seed: int, wanted: Iterable[str]) -> TensorSource:
    """wanted: the Hugging Face names of the tensors that will be read."""
    match files.kind:
        case "safetensors":
            return SafetensorsSource(files.weight_files)
        case "gguf":
            return GGUFSource(files.weight_files[0], wanted)
        case "dummy":
            return DummySource(seed)


class _OfThread(threading.local):
    staging: Staging | None = None  # allocated for the device of the first tensor that the thread reads


class SafetensorsSource(TensorSource):
    """Reads with pread through small buffers, on a CPU one that stays in its cache.

    Measured on 538 MB of float32 in the page cache: 0.12 s, as fast as reading straight into the final tensors, while a
    first pass through mmap took up to 1.8 s of page faults. A file that is truncated during the read is an error here,
    and would be a SIGBUS there.
    """

    BUFFER_BYTES = 4 << 20

    def __init__(self, files: Sequence[str]) -> None:
        self._index = TensorIndex(files)
        self.shapes = {name: entry.shape for name, entry in self._index.items()}
        self._opened: dict[str, io.FileIO] = {}
        self._lock = threading.Lock()  # guards _opened
        self._of_thread = _OfThread()

    def file_of(self, name: str) -> str:
        return self._index[name].file

    def read(self, part: WeightPart, init: Uniform, out: torch.Tensor) -> None:
        name = part.checkpoint_name
        entry = self._index[name]
        dtype = _dtype(name, entry, part.dtype_for(out))
        out = out if part.dim < 2 else out.flatten(0, part.dim - 1)
        inner_bytes = math.prod(entry.shape[part.dim + 1 :]) * dtype.itemsize
        stride = math.prod(entry.shape[max(1, part.dim) :]) * dtype.itemsize  # bytes of a row in the file
        row_bytes = stride if part.dim == 0 else part.length * inner_bytes
        begin = entry.begin + part.start * inner_bytes
        staging = self._of_thread.staging
        if staging is None:
            staging = self._of_thread.staging = Staging(self.BUFFER_BYTES, out.device)
        rows_at_once = _whole_runs(self.BUFFER_BYTES // row_bytes, part)
        for first in range(0, out.shape[0], rows_at_once):
            rows = out[first : first + rows_at_once]
            buffer = staging.buffer(len(rows) * row_bytes)
            self._fill(buffer, name, entry, begin + first * stride, stride, row_bytes)
            staging.copy(buffer.view(dtype).view(part.shape_for(rows)), rows, part)

    def _fill(self, out: torch.Tensor, name: str, entry: TensorEntry, begin: int, stride: int, row_bytes: int) -> None:
        """Fills `out` with runs of `row_bytes`, `stride` bytes apart in the file."""
        num_bytes = out.numel()
        num_runs, run_bytes = (1, num_bytes) if row_bytes == stride else (num_bytes // row_bytes, row_bytes)
        descriptor, buffer = self._descriptor(entry.file), out.numpy().data
        for run in range(num_runs):
            at, end, offset = run * run_bytes, (run + 1) * run_bytes, begin + run * stride
            while at < end:
                got = os.preadv(descriptor, [buffer[at:end]], offset)
                if not got:
                    raise ModelLoadError(
                        f"{entry.file}: truncated: tensor {name!r} goes on at byte {offset}, where the file ends; "
                        "download it again",
                        path=entry.file,
                        tensor=name,
                    )
                at, offset = at + got, offset + got

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._opened:
                self._opened[file] = open_model_file(file)
            return self._opened[file].fileno()

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()


def _dtype(name: str, entry: TensorEntry, wanted: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in its file. Raises `ModelLoadError` where it cannot fill one of dtype `wanted`."""
    dtype = CHECKPOINT_DTYPES.get(entry.dtype)
    if dtype is None or not is_readable(dtype, wanted):
        fitting = [key for key, stored in CHECKPOINT_DTYPES.items() if is_readable(stored, wanted)]
        raise ModelLoadError(
            f"{entry.file}: tensor {name!r} is {entry.dtype}, with which the model does not compute; "
            f"give a checkpoint in {', '.join(fitting)}",
            path=entry.file,
            tensor=name,
        )
    return dtype


class GGUFSource(TensorSource):
    """Dequantizes the rows it needs, a few at a time; a slice of columns needs whole rows."""

    PIECE_ELEMENTS = 1 << 20

    def __init__(self, path: str, wanted: Iterable[str]) -> None:
        self._path = path
        self._tensors = GGUFTensors(path, FAMILIES, wanted)
        self.shapes = self._tensors.shapes
        self.kinds = self._tensors.kinds()

    def file_of(self, name: str) -> str:
        return self._path

    def read(self, part: WeightPart, init: Uniform, out: torch.Tensor) -> None:
        first_row = part.start if part.dim == 0 else 0
        if part.blocks is not None:
            self._read_blocks(part, part.blocks, first_row, out)
            return
        rows_at_once = _whole_runs(self.PIECE_ELEMENTS // math.prod(part.checkpoint_shape[1:]), part)
        if self._tensors.is_read_whole(part.checkpoint_name):
            rows_at_once = len(out)
        for done in range(0, len(out), rows_at_once):
            stop = min(done + rows_at_once, len(out))
            rows = torch.from_numpy(self._tensors.read(part.checkpoint_name, first_row + done, first_row + stop))
            rows = rows if part.dim == 0 else rows.narrow(part.dim, part.start, part.length)
            out[done:stop].copy_(part.final(rows))

    def _read_blocks(self, part: WeightPart, form: GgufFormat, first_row: int, out: torch.Tensor) -> None:
        first_byte = 0 if part.dim == 0 else form.row_bytes(part.start)
        rows_at_once = _whole_runs(self.PIECE_ELEMENTS // out.shape[1], part)
        for done in range(0, len(out), rows_at_once):
            stop = min(done + rows_at_once, len(out))
            rows = self._tensors.read_stored(part.checkpoint_name, first_row + done, first_row + stop)
            out[done:stop].copy_(part.ordered(torch.from_numpy(rows)[:, first_byte : first_byte + out.shape[1]]))


class DummySource(TensorSource):
    """Random tensors: an element depends on the seed, the tensor's name and the element's index in the whole tensor
    alone, not on the slice that is read, nor on the device, where they are generated.

    On a CPU several threads generate.
    """

    GROUP_ELEMENTS = 1 << 17  # generated per task on a CPU: they stay in its cache
    DEVICE_GROUP_ELEMENTS = 1 << 24
    shapes = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_threads = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._num_threads)  # starts no thread before the first task

    def file_of(self, name: str) -> str:
        return "dummy weights"

    def read(self, part: WeightPart, init: Uniform, out: torch.Tensor) -> None:
        on_host = out.device.type == "cpu"
        row_elements = math.prod(part.checkpoint_shape[1:])
        group_elements = self.GROUP_ELEMENTS if on_host else self.DEVICE_GROUP_ELEMENTS
        group_rows = _whole_runs(group_elements // row_elements, part)
        first_row = part.start if part.dim == 0 else 0
        digest = hashlib.sha256(f"{self._seed}/{part.checkpoint_name}".encode()).digest()
        keys = struct.unpack_from("<2i", digest)

        @torch.inference_mode()  # thread-local
        def fill(begin: int) -> None:
            rows = out[begin : begin + group_rows]
            shape = (len(rows), *part.checkpoint_shape[1:])
            values = _uniform((first_row + begin) * row_elements, math.prod(shape), keys, out.device)
            values = values.mul_(init.high - init.low).add_(init.low).view(shape)
            values = values if part.dim == 0 else values.narrow(part.dim, part.start, part.length)
            rows.copy_(part.final(values))

        groups = range(0, len(out), group_rows)
        for _ in self._threads.map(fill, groups) if on_host else map(fill, groups):
            pass

    def close(self) -> None:
        self._threads.shutdown()


def _whole_runs(num_rows: int, part: WeightPart) -> int:
    """About num_rows rows, in whole runs of the part's order."""
    return max(1, num_rows // part.run) * part.run


def _uniform(first: int, count: int, keys: tuple[int, int], device: torch.device) -> torch.Tensor:
    """[count] float32 in (0, 1), the same on every device: a hash of the integers `first`, `first` + 1, ...

    Method: the 32-bit integer hash "lowbias32" of C. Wellons (hash-prospector), in wrapping arithmetic.
    """
    x = torch.arange(count, dtype=torch.int32, device=device)
    x.add_(_signed(first)).mul_(_signed(0x9E3779B1)).add_(keys[0])
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor)).bitwise_xor_(keys[1])
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)


def _signed(number: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
