"""Which decoders one launch of `persistent_layers` computes, and by which tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringcore.kernels.linears.skinny_times import NUM_SMS

__all__ = [
    "DecoderShape",
    "PersistentTiles",
    "ProductTiles",
    "choose_persistent_tiles",
    "heads_at_once",
    "is_small_layer",
]

_THREADS, _NUM_WARPS = 256, 8
_MAX_SHARED_BYTES = 227 << 10  # of the one program of an SM
_MAX_UNIT_ROWS = 8
_WINDOW, _EARLY_WINDOW, _SMALL_WINDOW = 64 << 10, 32 << 10, 16 << 10  # bytes on their way; see the kernel
_SLOT_BYTES = range(8 << 10, (20 << 10) + 1, 512)
_MIN_SLOTS, _MAX_SPLITS, _MAX_LONG_SPLITS = 4, 16, 32
_TILE, _MAX_TILES_OF_ONE = 64, 3  # tokens; tiles of a context that is not split
_MAX_INPUTS_OF_THREAD = 80  # in registers
_MAX_GROUP, _HEADS_AT_ONCE = 8, 2  # query heads of a program; of a long context those that warps merge at once
_LONG_CONTEXT = 512  # tokens for each query head of a KV head, from which on attention is by tensor cores
_MAX_PARTS = 4  # of a row
_MAX_INPUTS_OF_LANE = 80  # likewise, where a warp has whole rows
_SMALL_LAYER = 1.2  # in rings
_BLOCK, _SCALE_ROOM = 128, 512  # outputs, and inputs, of codes that share a scale; bytes of a slot for scales


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes that all layers share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_experts: int = 0  # 0: the MLP is dense; else they are of the intermediate size
    num_chosen: int = 0  # experts of a token
    weight_bytes: int = 2  # of a linear's weight; 1: codes with a scale for each block of 128 x 128

    @property
    def num_gated(self) -> int:
        """Inputs of down: of a mixture, of all chosen experts."""
        return self.intermediate_size * (self.num_chosen or 1)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Of a product; see `Product` in the kernel."""

    inputs: int
    outputs: int
    parts: int
    slot_rows: int
    unit_rows: int
    weight_bytes: int = 2

    @property
    def rows_of_program(self) -> int:
        """At most."""
        return -(-self.outputs // self.unit_rows // NUM_SMS) * self.unit_rows


@dataclass(frozen=True, slots=True)
class PersistentTiles:
    """Of all products of a layer: QKV, output, gate and up, down; and of a mixture the router.

    A layer is small if most of it is in the rings at once: then its time is that of the row's way through it, and few
    bytes are on their way, which would delay what programs tell each other. In a small layer a warp has whole rows of
    the first and the third product (`multiply_by_warps`).
    """

    products: tuple[ProductTiles, ...]
    is_small: bool
    slot_bytes: int
    num_slots: int
    scratch_bytes: int
    group: int  # query heads of a program
    max_splits: int
    long_group: int  # likewise, where the context is long
    max_long_splits: int
    routing_bytes: int = 0  # of a mixture

    @property
    def shared_bytes(self) -> int:
        ring = self.num_slots * (self.slot_bytes + 16)
        return ring + self.scratch_bytes + 4 * _NUM_WARPS + 8 + self.routing_bytes

    def window(self, *, early: bool) -> int:
        """Slots."""
        num_bytes = _SMALL_WINDOW if self.is_small else _EARLY_WINDOW if early else _WINDOW
        of_weights = self.slot_bytes - _SCALE_ROOM * (self.products[0].weight_bytes == 1)
        return min(self.num_slots, max(2, num_bytes // of_weights))

    @property
    def max_tiles_of_one(self) -> int:
        """Tiles of a context that is one split. One more exchange takes longer in a large layer: weights are on their
        way."""
        return 1 if self.is_small else _MAX_TILES_OF_ONE

    @property
    def long_context(self) -> int:
        """Tokens, from which on a context is long. More heads take longer to merge."""
        return _LONG_CONTEXT * self.long_group

    @property
    def fill(self) -> float:
        """Of the bytes of the slots that a layer goes through, those with weights."""
        used = sum(of.inputs * of.outputs * of.weight_bytes for of in self.products)
        slots = sum(of.outputs * of.parts // of.slot_rows for of in self.products)
        return used / (slots * self.slot_bytes)


@functools.cache
def choose_persistent_tiles(shape: DecoderShape) -> PersistentTiles | None:
    """The slots that weights fill best, of these the largest: few copies are fast ones. None: the kernel cannot compute
    such a decoder."""
    return max(_candidates(shape), key=lambda tiles: (round(50 * tiles.fill), tiles.slot_bytes), default=None)


def _candidates(shape: DecoderShape) -> Iterator[PersistentTiles]:
    heads, group, long_group = shape.num_heads * shape.head_size, _group(shape), heads_at_once(shape)
    splits = min(_MAX_SPLITS, NUM_SMS // (shape.num_heads // group))
    long_splits = min(_MAX_LONG_SPLITS, NUM_SMS // (shape.num_heads // long_group))
    sizes = shape.hidden_size, heads
    serves = shape.head_size in (64, 128) and group <= _MAX_GROUP and splits and _serves_experts(shape)
    if not serves or any(size % (2 * _THREADS) or size > _THREADS * _MAX_INPUTS_OF_THREAD for size in sizes):
        return
    routing = 8 + 4 * shape.num_experts + 8 * shape.num_chosen + 8 if shape.num_experts else 0
    of_warps = 4 * _NUM_WARPS * (shape.head_size + 2)  # sums of a head, its maximum and its total
    of_short = group * (of_warps + 4 * shape.head_size + 4 * _TILE)
    of_attention = 4 * shape.head_size + max(of_short, _HEADS_AT_ONCE * of_warps)
    is_small, shares = is_small_layer(shape), (group, splits, long_group, long_splits)
    for slot_bytes in (size + _SCALE_ROOM * (shape.weight_bytes == 1) for size in _SLOT_BYTES):
        products = _products(shape, slot_bytes, is_small)
        if not _are_whole(shape, products):
            continue
        of_sums = max(of.rows_of_program for of in products) * _NUM_WARPS * 4
        scratch = -(-max(of_sums, of_attention, is_small * 4 * shape.hidden_size) // 16) * 16
        tiles = PersistentTiles(products, is_small, slot_bytes, 0, scratch, *shares, routing)
        num_slots = (_MAX_SHARED_BYTES - tiles.shared_bytes) // (slot_bytes + 16)
        if num_slots >= _MIN_SLOTS:
            yield replace(tiles, num_slots=num_slots)


def _group(shape: DecoderShape) -> int:
    """Few query heads, so that they take little time; their keys are read by several programs."""
    of_kv_head = shape.num_heads // shape.num_kv_heads
    return next((count for count in range(2, of_kv_head) if of_kv_head % count == 0), of_kv_head)


def heads_at_once(shape: DecoderShape) -> int:
    """As many query heads as tensor cores multiply at once, so that keys are read once."""
    of_kv_head = shape.num_heads // shape.num_kv_heads
    return next(count for count in range(min(_MAX_GROUP, of_kv_head), 0, -1) if of_kv_head % count == 0)


def is_small_layer(shape: DecoderShape) -> bool:
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    num_bytes = 2 * shape.hidden_size * (heads + 3 * shape.intermediate_size)
    fits_a_warp = shape.hidden_size <= 32 * _MAX_INPUTS_OF_LANE and shape.weight_bytes == 2
    return fits_a_warp and not shape.num_experts and num_bytes <= _SMALL_LAYER * NUM_SMS * _MAX_SHARED_BYTES


def _serves_experts(shape: DecoderShape) -> bool:
    """Or there are none. A thread compares an expert with others, by vectors of four."""
    return shape.num_experts % 4 == 0 and shape.num_experts <= _THREADS


def _are_whole(shape: DecoderShape, products: tuple[ProductTiles, ...]) -> bool:
    """Units are of whole rows, and of one expert; the inputs of down have room in registers. Scales are of rows."""
    gate_up, down = products[2:4]
    max_parts = _MAX_PARTS if shape.weight_bytes == 2 else 1
    if any(of.outputs % of.unit_rows or of.parts > max_parts for of in products if of is not down):
        return False
    size, of_one = down.inputs // down.parts, shape.weight_bytes
    if size % 8 or down.outputs % down.unit_rows or down.parts * _of_thread(size, of_one) > _MAX_INPUTS_OF_THREAD:
        return False
    if of_one == 1 and (shape.intermediate_size % _BLOCK or shape.num_kv_heads * shape.head_size % _BLOCK):
        return False
    if shape.num_experts:
        return gate_up.parts == 1 and shape.intermediate_size % (gate_up.unit_rows // 2) == 0
    return down.parts <= max_parts


def _of_thread(size: int, weight_bytes: int) -> int:
    """Numbers of a part of a row, as in the kernel."""
    if weight_bytes == 1:
        vectors = {width: -(-size // (width * _THREADS)) for width in (16, 8, 4)}
        return min((count * (width + 5), count * width) for width, count in vectors.items())[1]
    if size % (2 * _THREADS) == 0:
        return size // _THREADS
    return next((width for width in (2, 4) if size <= width * _THREADS), -(-size // (8 * _THREADS)) * 8)


def _products(shape: DecoderShape, slot_bytes: int, is_small: bool) -> tuple[ProductTiles, ...]:
    hidden, inner, heads = shape.hidden_size, shape.num_gated, shape.num_heads * shape.head_size
    qkv, of_one = heads + 2 * shape.num_kv_heads * shape.head_size, shape.weight_bytes
    (qkv_parts, qkv_rows), (out_parts, out_rows) = (_of_slot(size, slot_bytes, of_one) for size in (hidden, heads))
    if shape.num_experts:  # a slot has rows of one expert
        down_parts, down_rows = shape.num_chosen, _rows_of_slot(shape.intermediate_size, slot_bytes, of_one, 1)
    else:
        down_parts, down_rows = _of_slot(inner, slot_bytes, of_one)
    added = _unit_rows(hidden, max(out_rows, down_rows))  # a program has the same rows of both
    units = _unit_rows(qkv, qkv_rows), _unit_rows(2 * inner, 2 * qkv_rows)
    qkv_unit, gate_up_unit = (_NUM_WARPS, 2 * _NUM_WARPS) if is_small else units
    of_layer = (
        ProductTiles(hidden, qkv, qkv_parts, qkv_rows, qkv_unit, of_one),
        ProductTiles(heads, hidden, out_parts, out_rows, added, of_one),
        ProductTiles(hidden, 2 * inner, qkv_parts, qkv_rows, gate_up_unit, of_one),
        ProductTiles(inner, hidden, down_parts, down_rows, added, of_one),
    )
    router = ProductTiles(hidden, shape.num_experts, _of_slot(hidden, slot_bytes, 2)[0], 1, 1)
    return (*of_layer, router) if shape.num_experts else of_layer


def _unit_rows(outputs: int, least: int) -> int:
    """Of those with the fewest rows of a program the largest: a unit ends with a sum over lanes."""
    units = [unit for unit in (2, 4, 8) if least <= unit <= _MAX_UNIT_ROWS]
    return min(units, key=lambda unit: (-(-outputs // unit // NUM_SMS) * unit, -unit))


def _of_slot(inputs: int, slot_bytes: int, weight_bytes: int) -> tuple[int, int]:
    """(Parts of a row, rows of a slot.) Threads share out a part evenly where they can, else by vectors of eight."""
    room = slot_bytes - _scale_bytes(inputs, weight_bytes)
    fitting = [n for n in range(1, _MAX_PARTS + 1) if weight_bytes * inputs <= n * room]
    even = [n for n in fitting if inputs % (2 * _THREADS * n) == 0]
    parts = next(
        (n for n in even or fitting if inputs % (8 * n) == 0), _MAX_PARTS + 1
    )  # too many: such slots do not do
    return parts, 1 if parts > 1 else _rows_of_slot(inputs, slot_bytes, weight_bytes, 2)


def _rows_of_slot(inputs: int, slot_bytes: int, weight_bytes: int, slots_of_unit: int) -> int:
    room = slot_bytes - _scale_bytes(inputs, weight_bytes)
    return min(_MAX_UNIT_ROWS // slots_of_unit, _power_of_2(room // (weight_bytes * inputs)))


def _scale_bytes(inputs: int, weight_bytes: int) -> int:
    """Of rows of codes: copies of whole 16 bytes, which may begin before them."""
    blocks = inputs // _BLOCK
    return 0 if weight_bytes == 2 else 4 * blocks if blocks % 4 == 0 else (blocks + 6) // 4 * 16


def _power_of_2(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)
