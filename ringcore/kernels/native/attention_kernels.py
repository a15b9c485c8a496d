"""The C function of `attention.c`: writes a step's keys and values, and attends over pages."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ringcore.kernels.native.compiled import NoLibrary, load_compiled
from ringcore.kernels.native.threads import KINDS, RUN_ARGUMENTS, check, how_to_run

__all__ = ["AttentionKernel", "AttentionStep", "PageShape", "attention_kernel", "decode_items", "split_items"]

_log = logging.getLogger(__name__)
_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

_SPAN, _MOST_ROWS = 256, 64  # as in C
_SPLIT_SPANS = 4  # rows are split (split-KV) at every multiple of so many spans, whatever they see


class PageShape(NamedTuple):
    """What a layer's cache looks like: keys, then values, each [sections, num_blocks, heads of a section, block_size,
    numbers]. window, chunk: which tokens a token sees; 0: all before it."""

    block_size: int
    head_size: int
    value_size: int
    num_heads: int
    num_kv_heads: int
    heads_per_section: int
    window: int
    chunk: int
    dtype: torch.dtype

    def first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first token that the token at each of these positions sees."""
        if self.window:
            return np.maximum(positions - self.window + 1, 0)
        return positions - positions % self.chunk if self.chunk else np.zeros_like(positions)


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("block_size", "head_size", "value_size", "num_heads", "num_kv_heads")),
        *((name, _int64) for name in ("heads_per_section", "num_blocks", "window", "chunk")),
        ("kind", _int32),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("layout", "starts", "lens", "table")),
        *(("num_seqs", _int64), ("table_stride", _int64), ("items", _pointer), ("num_items", _int64)),
        *(("num_partials", _int64), ("slots", _pointer), ("num_tokens", _int64), ("num_operations", _int64)),
    )


class AttentionStep:
    """The sequences of a step, as `attention.c` reads them: for all layers of one shape."""

    def __init__(
        self, shape: PageShape, starts: np.ndarray, lens: np.ndarray, table: np.ndarray, slots: torch.Tensor
    ) -> None:
        """starts: [num_seqs + 1] int32, lens: [num_seqs] int32, table: [num_seqs, blocks] int32, slots: [num_tokens]
        int64."""
        items, num_partials, num_operations = decode_items(shape, starts, lens) or split_items(shape, starts, lens)
        starts, lens, table = (np.ascontiguousarray(each, np.int32) for each in (starts, lens, table))
        self._arrays = starts, lens, table, items, slots  # which the structure points to
        self.layout = _Layout(*shape[:6], 0, shape.window, shape.chunk, KINDS[shape.dtype])
        self._step = _Step(
            ctypes.addressof(self.layout),
            *(array.ctypes.data for array in (starts, lens, table)),
            *(len(lens), table.strides[0] // 4),
            *(items.ctypes.data, len(items), num_partials),
            *(slots.data_ptr(), len(slots), num_operations),
        )
        self._followed: AttentionStep | None = None
        self._at = ctypes.c_void_p(ctypes.addressof(self._step))
        self.address = ctypes.addressof(self._at)

    def follow(self, step: AttentionStep) -> None:
        """The calls that were recorded with this step read `step`, of the same shape and number of tokens, from now
        on."""
        step.layout.num_blocks = self.layout.num_blocks
        self._followed = step
        self._at.value = ctypes.addressof(step._step)


def decode_items(shape: PageShape, starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, int, int] | None:
    """`split_items` of sequences with a token each and contexts that are not split; None for others."""
    n = len(lens)
    if not n or (np.diff(starts) != 1).any() or lens.max() > _SPLIT_SPANS * _SPAN:
        return None
    items = np.zeros((n, 6), np.int32)
    items[:, 0] = np.arange(n)
    items[:, 2], items[:, 5] = 1, -1
    items[:, 4] = ends = (lens + (_SPAN - 1)) // _SPAN
    if shape.window or shape.chunk:
        items[:, 3] = shape.first_seen(lens.astype(np.int64) - 1) // _SPAN
    num_spans = ends - items[:, 3]
    if n > 1:
        items = items[np.argsort(-num_spans, kind="stable")]
    return items, 0, int(num_spans.sum()) * _SPAN * shape.num_heads * (shape.head_size + shape.value_size)


def split_items(shape: PageShape, starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The work items of a step: [n, 6] int32, see `Item` in C; how many rows of a head are split; how many
    multiplications there are.

    An item has the rows of up to `_MOST_ROWS` / group tokens, the longest first, as threads take them in order.
    """
    group = shape.num_heads // shape.num_kv_heads
    most = max(1, _MOST_ROWS // group)
    query_lens = np.diff(starts).astype(np.int64)
    counts = -(-query_lens // most)
    seqs = np.arange(len(lens)).repeat(counts)
    tokens = (np.arange(len(seqs)) - (counts.cumsum() - counts)[seqs]) * most
    num_tokens = np.minimum(query_lens[seqs] - tokens, most)
    positions = lens[seqs] - query_lens[seqs] + tokens
    first_spans, end_spans = shape.first_seen(positions) // _SPAN, -(-(positions + num_tokens) // _SPAN)
    num_operations = ((end_spans - first_spans) * num_tokens).sum() * _SPAN * shape.num_heads
    order = np.argsort((first_spans - end_spans) * num_tokens, kind="stable")
    rows = np.stack((seqs, tokens, num_tokens, first_spans, end_spans, np.full_like(seqs, -1)), 1)[order]
    num_partials = 0
    first_pieces = rows[:, 3] // _SPLIT_SPANS
    pieces = (rows[:, 4] - 1) // _SPLIT_SPANS - first_pieces + 1
    if len(rows) and pieces.max() > 1:
        of_item = np.arange(len(rows)).repeat(pieces)
        piece = np.arange(len(of_item)) - (pieces.cumsum() - pieces)[of_item]
        rows = rows[of_item]
        begins = (first_pieces[of_item] + piece) * _SPLIT_SPANS
        rows[:, 3] = np.maximum(rows[:, 3], begins)
        rows[:, 4] = np.minimum(rows[:, 4], begins + _SPLIT_SPANS)
        num_rows = np.where(pieces[of_item] > 1, rows[:, 2] * group, 0)
        rows[:, 5] = np.where(num_rows, num_rows.cumsum() - num_rows, -1)
        num_partials = int(num_rows.sum())
    return (
        np.ascontiguousarray(rows, np.int32),
        num_partials,
        int(num_operations) * (shape.head_size + shape.value_size),
    )


class AttentionKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._attention = library.attention
        rows = _pointer, _int64
        self._attention.argtypes = (
            *(_pointer, *rows, *rows, *rows, _pointer, _pointer, _pointer),
            *(_pointer, _float, _float, *RUN_ARGUMENTS),
        )

    def __call__(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: Sequence[torch.Tensor],
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float,
        writes: bool = True,
    ) -> None:
        """Writes key and value to the slots of the step unless they are there (`writes`), then attends.

        query: [num_tokens, num_heads, head_size], key: [num_tokens, num_kv_heads, head_size], value: likewise, each of
        any row stride, the heads of a row contiguous. pages: of keys and of values, see `PageShape`. out: [num_tokens,
        num_heads, value_size], contiguous. sinks: [num_heads] float32.
        """
        step.layout.num_blocks = pages[0].shape[1]
        check(
            self._attention(
                step.address,
                query.data_ptr(),
                query.stride(0),
                key.data_ptr() if writes else None,
                key.stride(0),
                value.data_ptr() if writes else None,
                value.stride(0),
                pages[0].data_ptr(),
                pages[1].data_ptr(),
                out.data_ptr(),
                None if sinks is None else sinks.data_ptr(),
                scale,
                softcap,
                *how_to_run(),
            )
        )


@functools.cache
def attention_kernel() -> AttentionKernel | None:
    """None where it cannot be compiled, which is logged once."""
    try:
        return AttentionKernel(load_compiled("attention.c"))
    except NoLibrary as reason:
        _log.info("attention takes several operations of torch: %s", reason)
        return None
