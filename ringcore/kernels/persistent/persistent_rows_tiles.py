"""Which decoders `persistent_rows` computes, and by which tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.persistent.persistent_tiles import DecoderShape, heads_at_once, is_small_layer

__all__ = ["MAX_ROWS", "RowsProduct", "RowsTiles", "choose_rows_tiles"]

MAX_ROWS = 8
_NUM_WARPS, _TILE_ROWS, _GROUP_TILES = 8, 8, 4
_COLUMN, _STEP = 64, 512  # inputs that a warp, and all warps, multiply at once
_MAX_CHUNK = 5120  # inputs whose share a thread has in registers
_MAX_SHARED_BYTES = 227 << 10
_SLOT_BYTES = range(8 << 10, (24 << 10) + 1, 512)
_MIN_SLOTS = 8
_WINDOW, _EARLY_WINDOW, _SMALL_WINDOW = 64 << 10, 32 << 10, 16 << 10  # bytes on their way, as of one row


@dataclass(frozen=True, slots=True)
class RowsProduct:
    """Of a product; see `Product` in the kernel."""

    inputs: int
    outputs: int
    chunk: int
    slot_rows: int

    @property
    def slot_bytes(self) -> int:
        return 2 * self.chunk * self.slot_rows


@dataclass(frozen=True, slots=True)
class RowsTiles:
    """Of the products of a layer: QKV, output, gate and up, down."""

    products: tuple[RowsProduct, ...]
    is_small: bool
    slot_bytes: int
    num_slots: int
    scratch_bytes: int
    group: int  # query heads of a program

    @property
    def shared_bytes(self) -> int:
        return self.num_slots * (self.slot_bytes + 16) + self.scratch_bytes + 4 * _NUM_WARPS + 8

    def window(self, *, early: bool) -> int:
        """Slots."""
        num_bytes = _SMALL_WINDOW if self.is_small else _EARLY_WINDOW if early else _WINDOW
        return min(self.num_slots, max(2, num_bytes // self.slot_bytes))

    @property
    def fill(self) -> float:
        """Of the bytes of the slots that a layer goes through, those with weights."""
        used = sum(of.inputs * of.outputs for of in self.products)
        taken = sum(-(-of.inputs // of.chunk) * of.outputs / of.slot_rows for of in self.products)
        return 2 * used / (taken * self.slot_bytes)


@functools.cache
def choose_rows_tiles(shape: DecoderShape) -> RowsTiles | None:
    """The slots that weights fill best, of these the largest. None: the kernel cannot compute such a decoder."""
    return max(_candidates(shape), key=lambda tiles: (round(20 * tiles.fill), tiles.slot_bytes), default=None)


def _candidates(shape: DecoderShape) -> Iterator[RowsTiles]:
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    is_dense = shape.num_experts == 0 and shape.weight_bytes == 2
    if not is_dense or shape.head_size not in (64, 128) or hidden % _STEP or heads % _STEP or inner % _COLUMN:
        return
    if hidden > _MAX_CHUNK or -(-hidden // 2 // NUM_SMS) * 2 > 2 * _GROUP_TILES * _TILE_ROWS:
        return
    group = heads_at_once(shape)
    scratch = _scratch_bytes(shape, group)
    for slot_bytes in _SLOT_BYTES:
        products = [_product(*sizes, slot_bytes) for sizes in _sizes(shape)]
        room = _MAX_SHARED_BYTES - scratch - 4 * _NUM_WARPS - 8
        num_slots = room // (slot_bytes + 16)
        found = tuple(product for product in products if product is not None)
        fits = slot_bytes >= 64 * shape.head_size and any(of.slot_bytes == slot_bytes for of in found)
        if len(found) == len(products) and num_slots >= _MIN_SLOTS and fits:
            yield RowsTiles(found, is_small_layer(shape), slot_bytes, num_slots, scratch, group)


def _sizes(shape: DecoderShape) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of products."""
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    qkv = heads + 2 * shape.num_kv_heads * shape.head_size
    return (hidden, qkv), (heads, hidden), (hidden, 2 * inner), (inner, hidden)


def _product(inputs: int, outputs: int, slot_bytes: int) -> RowsProduct | None:
    steps, chunks = -(-inputs // _STEP), -(-inputs // _MAX_CHUNK)
    chunk = inputs if chunks == 1 else _STEP * -(-steps // chunks)
    rows = slot_bytes // (2 * chunk)
    return RowsProduct(inputs, outputs, chunk, min(_TILE_ROWS, 1 << (rows.bit_length() - 1))) if rows else None


def _scratch_bytes(shape: DecoderShape, group: int) -> int:
    """As in the kernel: sums, squares, angles, plans."""
    merged = 4 if group > 2 else 2
    of_attention = 4 * shape.head_size + _NUM_WARPS * merged * (8 + 4 * (shape.head_size + 8))
    of_products = 2 * _GROUP_TILES * _NUM_WARPS * _TILE_ROWS * MAX_ROWS * 4
    others = 4 * _NUM_WARPS * MAX_ROWS + 4 * MAX_ROWS * shape.head_size + 2 * 4 * (2 * MAX_ROWS + 1)
    return -(-(max(of_attention, of_products) + others) // 16) * 16


def exchanged_words(shape: DecoderShape, tiles: RowsTiles) -> int:
    """Of a layer, as in the kernel."""
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    qkv = heads + 2 * shape.num_kv_heads * shape.head_size
    of_row = MAX_ROWS // 2
    stream = _aligned(hidden * of_row + NUM_SMS * MAX_ROWS)
    sums = NUM_SMS * 2 * tiles.group
    return 2 * stream + MAX_ROWS * qkv + sums * shape.head_size + _aligned(sums) + (heads + inner) * of_row


def _aligned(words: int) -> int:
    return -(-words // 4) * 4
