"""Where the tensors of a checkpoint come from: safetensors files, a GGUF file, or a seed."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from ringcore.checkpoint import ModelFiles, TensorEntry, TensorIndex
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.errors import ModelLoadError
from ringcore.model_executor.staging import Staging
from ringcore.model_executor.weight import Init, WeightPart

__all__ = ["TensorSource", "open_source"]


class TensorSource(ABC):
    """The tensors of one checkpoint under their Hugging Face names."""

    shapes: Mapping[str, tuple[int, ...]] | None  # None where any tensor of any shape is there

    @abstractmethod
    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    @abstractmethod
    def read(self, part: WeightPart, init: Init, out: torch.Tensor) -> None:
        """Copies the slice that `part` describes into `out`, a tensor or view of its shape.

        `out` may be of any float dtype and device. Raises `ModelLoadError` where the data is not there.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Gives back what reading needed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(files: ModelFiles, seed: int) -> TensorSource:
    match files.kind:
        case "safetensors":
            return SafetensorsSource(files.weight_files)
        case "gguf":
            return GGUFSource(files.weight_files[0])
        case "dummy":
            return DummySource(seed)


class SafetensorsSource(TensorSource):
    """Reads with pread through small buffers, on a CPU one that stays in its cache.

    Measured on 538 MB of float32 in the page cache: 0.12 s, as fast as reading straight into the final tensors,
    while a first pass through mmap took up to 1.8 s of page faults. A file that shrinks under us is an error
    here, and would be a SIGBUS there.
    """

    BUFFER_BYTES = 4 << 20
    DTYPES: Mapping[str, torch.dtype] = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }

    def __init__(self, files: Sequence[str]) -> None:
        self._index = TensorIndex(files)
        self.shapes = {name: entry.shape for name, entry in self._index.items()}
        self._descriptors: dict[str, int] = {}
        self._staging: Staging | None = None  # made for the device of the first tensor that is read

    def file_of(self, name: str) -> str:
        return self._index[name].file

    def read(self, part: WeightPart, init: Init, out: torch.Tensor) -> None:
        name = part.checkpoint_name
        entry = self._index[name]
        dtype = self._dtype(name, entry)
        stride = math.prod(entry.shape[1:]) * dtype.itemsize  # bytes of a row in the file
        if part.dim == 0:
            row_bytes, begin = stride, entry.begin + part.start * stride
        else:
            row_bytes, begin = part.length * dtype.itemsize, entry.begin + part.start * dtype.itemsize
        self._staging = staging = self._staging or Staging(self.BUFFER_BYTES, out.device)
        rows_at_once = max(1, self.BUFFER_BYTES // row_bytes)
        for first in range(0, out.shape[0], rows_at_once):
            rows = out[first : first + rows_at_once]
            buffer = staging.buffer(len(rows) * row_bytes)
            self._fill(buffer, name, entry, begin + first * stride, stride, row_bytes)
            staging.copy(buffer.view(dtype).view(rows.shape), rows)

    def _dtype(self, name: str, entry: TensorEntry) -> torch.dtype:
        if entry.dtype not in self.DTYPES:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} is {entry.dtype}; quantized checkpoints are not computed, "
                f"give one in {', '.join(self.DTYPES)}",
                path=entry.file,
                tensor=name,
            )
        return self.DTYPES[entry.dtype]

    def _fill(self, out: torch.Tensor, name: str, entry: TensorEntry, begin: int, stride: int, row_bytes: int) -> None:
        """Fills `out` with runs of `row_bytes`, `stride` bytes apart in the file."""
        num_bytes = out.numel()
        num_runs, run_bytes = (1, num_bytes) if row_bytes == stride else (num_bytes // row_bytes, row_bytes)
        if entry.file not in self._descriptors:
            self._descriptors[entry.file] = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        descriptor, buffer = self._descriptors[entry.file], out.numpy().data
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

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class GGUFSource(TensorSource):
    """Dequantizes the rows it needs, a few at a time; columns cannot be had without their row."""

    PIECE_ELEMENTS = 1 << 20

    def __init__(self, path: str) -> None:
        self._path = path
        self._tensors = GGUFTensors(path)
        self.shapes = self._tensors.shapes

    def file_of(self, name: str) -> str:
        return self._path

    def read(self, part: WeightPart, init: Init, out: torch.Tensor) -> None:
        first_row = part.start if part.dim == 0 else 0
        rows_at_once = max(1, self.PIECE_ELEMENTS // math.prod(part.checkpoint_shape[1:]))
        for done in range(0, len(out), rows_at_once):
            stop = min(done + rows_at_once, len(out))
            rows = torch.from_numpy(self._tensors.read(part.checkpoint_name, first_row + done, first_row + stop))
            out[done:stop].copy_(rows if part.dim == 0 else rows.narrow(part.dim, part.start, part.length))


class DummySource(TensorSource):
    """Random tensors that depend on the seed, the name and the whole shape, not on the slice that is read.

    Matrices are uniform with variance 1 / fan-in, so that activations and logits keep the size that they have in
    a trained model. Rows come in groups, each from its own generator: a rank draws the groups that it touches, and
    several at a time: a thread makes some 100 million numbers a second.
    """

    GROUP_ELEMENTS = 1 << 20
    shapes = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_threads = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._num_threads)

    def file_of(self, name: str) -> str:
        return "dummy weights"

    def read(self, part: WeightPart, init: Init, out: torch.Tensor) -> None:
        num_rows, *row_shape = part.checkpoint_shape
        first_row = part.start if part.dim == 0 else 0
        end_row = first_row + len(out)
        group_rows = max(1, self.GROUP_ELEMENTS // math.prod(row_shape))

        def drawn(group: int) -> tuple[int, torch.Tensor]:
            """Its first row, and of its rows those that are asked for, in the final dtype."""
            begin = group * group_rows
            values = self._group(part.checkpoint_name, group, (min(group_rows, num_rows - begin), *row_shape), init)
            low, high = max(begin, first_row), min(begin + len(values), end_row)
            rows = values[low - begin : high - begin]
            return low, (rows if part.dim == 0 else rows.narrow(part.dim, part.start, part.length)).to(out.dtype)

        for low, rows in self._in_threads(drawn, range(first_row // group_rows, -(-end_row // group_rows))):
            out[low - first_row : low - first_row + len(rows)].copy_(rows)

    def _in_threads(
        self, draw: Callable[[int], tuple[int, torch.Tensor]], groups: range
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """In order, and no more at a time than there are threads: what is drawn has to lie somewhere."""
        for first in range(0, len(groups), self._num_threads):
            yield from self._threads.map(draw, groups[first : first + self._num_threads])

    def close(self) -> None:
        self._threads.shutdown()

    def _group(self, name: str, group: int, shape: tuple[int, ...], init: Init) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}/{name}/{group}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.empty(shape, dtype=torch.float32)
        match init:
            case "matrix":
                bound = math.sqrt(3 / shape[-1])
                return values.uniform_(-bound, bound, generator=generator)
            case "bias":
                return values.uniform_(-0.05, 0.05, generator=generator)
            case "norm":
                return values.uniform_(0.8, 1.2, generator=generator)
