"""Weight loading: fills a model's final tensors, fused and sharded for one rank, straight from the checkpoint.

A layer declares its weights as data (`Weight`), in terms of the checkpoint; nothing here knows a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from types import TracebackType
from typing import Self

import torch

from ringcore.checkpoint import ModelFiles
from ringcore.checkpoint.expected_tensors import check_tensors, is_dispensable
from ringcore.model_executor.staging import CopyEvent, ReaderStreams
from ringcore.model_executor.tensor_source import TensorSource, open_source
from ringcore.model_executor.weight import Uniform, Weight, WeightPart

__all__ = [
    "Allocate",
    "Readers",
    "Weight",
    "WeightPart",
    "load_weights",
    "pending_weights",
    "read_again",
]

_ALIGNMENT = 256  # bytes: of each tensor in the shared allocation
_NUM_READERS = 8  # threads: a few saturate the host's memory bandwidth
_PIECE_BYTES = 32 << 20  # read by one thread; several read a large tensor

Allocate = Callable[[int], torch.Tensor]  # bytes -> uint8 [bytes], at a multiple of 256 bytes


def load_weights(
    weights: Sequence[Weight], files: ModelFiles, seed: int, device: torch.device, allocate: Allocate | None = None
) -> dict[str, torch.Tensor]:
    """Every weight by name, on `device`, after all are read; otherwise as `pending_weights`."""
    with pending_weights(weights, files, seed, device, allocate) as pending:
        return {weight.name: pending.pop(weight.name) for weight in weights}


@contextmanager
def pending_weights(
    weights: Sequence[Weight],
    files: ModelFiles,
    seed: int,
    device: torch.device,
    allocate: Allocate | None = None,
    may_ignore: Callable[[str], bool] = is_dispensable,
    kept: Allocate | None = None,
) -> Iterator[PendingWeights | PrefetchedWeights]:
    """The weights by name, each to be popped once. `seed` matters to dummy weights only.

    Without `allocate` each weight is allocated and read when it is popped, and the next one by a thread meanwhile: a
    model that packs its weights as it pops them never holds all of them twice; those that are arranged in their own
    memory stay, and have that of `kept` where given. With `allocate` all weights share one
    allocation and are prefetched by several threads from now on, and `pop` waits for the weight in question. Only this
    rank's slices are read. Raises `ModelLoadError`, here and not later, if a tensor is missing, has another shape than
    the model's, or has no place in the model and is none that it may ignore.
    """
    wanted = [part.checkpoint_name for weight in weights for part in weight.parts]
    with open_source(files, seed, wanted) as source:
        _check(weights, files, source, may_ignore)
        if allocate is None:
            with PendingWeights(weights, source, device, kept) as pending:
                yield pending
            return
        with PrefetchedWeights(weights, source, device, allocate) as prefetched:
            yield prefetched


def read_again(
    weights: Sequence[Weight], files: ModelFiles, seed: int, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Into the tensors that hold the weights, by name, which have lost their contents. Raises `ModelLoadError`."""
    wanted = [part.checkpoint_name for weight in weights for part in weight.parts]
    with open_source(files, seed, wanted) as source:
        for weight in weights:
            tensor = tensors[weight.name]
            if not weight.is_filled:
                tensor.zero_()
            for part, out in weight.places(tensor):
                source.read(part, weight.init, out)
            if (arrangement := weight.arrangement_on(device)) is not None:
                arrangement.arrange(tensor)


class PendingWeights:
    """Lazy weights: `pop` reads a weight, once. While its caller packs it a thread reads the next in order."""

    final = None  # the caller owns a popped weight and may pack or free it

    def __init__(
        self, weights: Sequence[Weight], source: TensorSource, device: torch.device, kept: Allocate | None
    ) -> None:
        self._weights = {weight.name: weight for weight in weights}  # not popped
        self._source, self._device, self._kept = source, device, kept
        self._ahead: dict[str, Future[torch.Tensor]] = {}  # at most one
        self._thread = ThreadPoolExecutor(1, "weights")
        self._is_inference = torch.is_inference_mode_enabled()  # thread-local

    def __len__(self) -> int:
        return len(self._weights)

    def pop(self, name: str, /) -> torch.Tensor:
        weight = self._weights.pop(name)
        ahead = self._ahead.pop(name, None)
        tensor = self._read(weight) if ahead is None else ahead.result()
        following = next(iter(self._weights.values()), None)
        if following is not None and not self._ahead:
            self._ahead[following.name] = self._thread.submit(self._read, following)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, weight: Weight) -> torch.Tensor:
        with torch.inference_mode(self._is_inference):
            return self._read_now(weight)

    def _read_now(self, weight: Weight) -> torch.Tensor:
        arrangement = weight.arrangement_on(self._device)
        if arrangement is not None and self._kept is not None:
            tensor = self._kept(weight.nbytes).view(weight.dtype).view(weight.shape)
        else:
            tensor = torch.empty(weight.shape, dtype=weight.dtype, device=self._device)
        if not weight.is_filled:
            tensor.zero_()
        for part, out in weight.places(tensor):
            self._source.read(part, weight.init, out)
        if arrangement is not None:
            arrangement.arrange(tensor)
        return tensor


class Readers:
    """Threads that read slices of weights from one source into tensors of `device`."""

    def __init__(self, source: TensorSource, device: torch.device) -> None:
        self._source = source
        self._streams = ReaderStreams(device)
        self._threads = ThreadPoolExecutor(min(_NUM_READERS, len(os.sched_getaffinity(0))))

    def read(self, places: Iterable[tuple[WeightPart, torch.Tensor]], init: Uniform) -> list[Future[CopyEvent]]:
        """Starts reading into the places of parts. A piece is complete once its future is done and its `CopyEvent` was
        waited for."""
        pieces = (piece for part, out in places for piece in part.pieces(out, _PIECE_BYTES))
        return [self._threads.submit(self._read, part, init, out) for part, out in pieces]

    @torch.inference_mode()  # thread-local
    def _read(self, part: WeightPart, init: Uniform, out: torch.Tensor) -> CopyEvent:
        with self._streams.of_thread() as stream:
            self._source.read(part, init, out)
            return stream.record()

    def close(self) -> None:
        """Cancels reads that have not begun; returns when no read is running."""
        self._threads.shutdown(cancel_futures=True)


class PrefetchedWeights:
    """Prefetched weights in one allocation: `pop` waits for a weight, and returns it once."""

    def __init__(
        self, weights: Sequence[Weight], source: TensorSource, device: torch.device, allocate: Allocate
    ) -> None:
        self.final: Mapping[str, torch.Tensor] = _carved(weights, device, allocate)  # all, popped or not, by name
        for weight in weights:
            if not weight.is_filled:
                self.final[weight.name].zero_()
        self._arrangements = {weight.name: weight.arrangement_on(device) for weight in weights}
        self._readers = Readers(source, device)
        self._reads = {
            weight.name: self._readers.read(weight.places(self.final[weight.name]), weight.init) for weight in weights
        }

    def __len__(self) -> int:
        return len(self._reads)

    def pop(self, name: str, /) -> torch.Tensor:
        for read in self._reads.pop(name):
            read.result().wait()
        arrangement = self._arrangements[name]
        if arrangement is not None:
            arrangement.arrange(self.final[name])
        return self.final[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.close()


def _carved(weights: Sequence[Weight], device: torch.device, allocate: Allocate) -> dict[str, torch.Tensor]:
    """A tensor for each weight, in one allocation."""
    starts = [0, *accumulate(-(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT for weight in weights)]
    memory = allocate(starts[-1])
    assert memory.device == device, (memory.device, device)
    return {
        weight.name: memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        for weight, start in zip(weights, starts, strict=False)  # the last start is the end
    }


def _check(
    weights: Sequence[Weight], files: ModelFiles, source: TensorSource, may_ignore: Callable[[str], bool]
) -> None:
    """Before anything is read: every tensor exists in the right shape, and none is left over."""
    if source.shapes is not None:
        expected = {part.checkpoint_name: part.checkpoint_shape for weight in weights for part in weight.parts}
        check_tensors(expected, source.shapes, files.path, source.file_of, may_ignore)
