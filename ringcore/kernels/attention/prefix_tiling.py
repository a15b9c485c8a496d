"""How shared prefixes are cut into units, and from how many sequences and tokens on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.page_layout import padded_head_size
from ringcore.kernels.launch.dependent_launch import supports_pdl

__all__ = ["MAX_SEQS", "SPAN_TILES", "UNIT_ROWS", "PrefixTiling"]

UNIT_ROWS = tl.constexpr(64)  # query rows of a unit, a tile for tensor cores
_MIN_SEQS, MAX_SEQS = 8, 1024  # that are compared with each other
_MAX_GROUP, _MAX_WIDTH = 32, 128  # query heads of a KV head, and their padded size
SPAN_TILES = 2  # of a span, or more
_MAX_SPANS = 8
_MIN_TILES = 4
# Of a layer, that a group must save. On an H200, 32 query and 8 KV heads of 128, us a layer with groups and without:
# 256 sequences of 1,160 tokens that share 992 (1 GB) 93 and 203, 64 of them (256 MB) 60 and 55; 8 of 16,550 that share
# 16,384 (470 MB) 63 and 93.
_MIN_SAVED_BYTES = 384 << 20
_SM_SHARED_BYTES = 200 << 10


class PrefixTiling(NamedTuple):
    """How shared prefixes are cut, for layers of one shape."""

    tile_tokens: int
    block_size: int
    num_kv_heads: int
    group: int  # query heads that share a KV head
    v_head_size: int
    max_spans: int  # units over which the prefix of such rows is divided, where it is long enough
    # (sequences - 1) * spans of a group: all programs wait for the units. Those of few sequences would be computed by
    # few programs, however long the prefix is, while what is not read again would have been read by all.
    min_lanes: int
    min_tiles: int  # of a shared prefix
    min_saved_tiles: int  # of a KV head: (sequences - 1) * tiles of a group

    @classmethod
    def choose(
        cls, tile_scheduler: DecodeTileScheduler, num_seqs: int, block_size: int, dtype: torch.dtype
    ) -> PrefixTiling | None:
        """For at most `num_seqs` sequences over caches of `dtype`. None: each sequence reads its prefix itself, since
        the kernel has no tiles for what a layer asks, or since there is too little to save."""
        group, num_kv_heads, tiling = tile_scheduler.group, tile_scheduler.num_kv_heads, tile_scheduler.tiling
        width = padded_head_size(max(tile_scheduler.head_size, tile_scheduler.v_head_size))
        is_global = tile_scheduler.window is None and tile_scheduler.chunk is None
        is_served = is_global and dtype.itemsize == 2 and not tile_scheduler.span_slots
        if not (is_served and group <= _MAX_GROUP and width <= _MAX_WIDTH and _MIN_SEQS <= num_seqs <= MAX_SEQS):
            return None
        if not _runs_whole_grids(tile_scheduler.tile_ranges.device):
            return None
        # As many units as programs: more spans are more to merge.
        max_spans = tile_scheduler.num_programs * UNIT_ROWS.value // (num_seqs * num_kv_heads * group)
        tile_bytes = (tile_scheduler.head_size + tile_scheduler.v_head_size) * dtype.itemsize * tiling.tile_tokens
        return cls(
            tile_tokens=tiling.tile_tokens,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            group=group,
            v_head_size=tile_scheduler.v_head_size,
            max_spans=max(1, min(max_spans, _MAX_SPANS)),
            min_lanes=-(-tile_scheduler.num_programs // num_kv_heads),
            min_tiles=_MIN_TILES,
            min_saved_tiles=max(1, _MIN_SAVED_BYTES // (num_kv_heads * tile_bytes)),
        )

    @property
    def unit_seqs(self) -> int:
        """Sequences whose query heads are the rows of a unit."""
        return UNIT_ROWS.value // self.group

    @property
    def granule_tokens(self) -> int:
        """Whole blocks and whole tiles: the length of a shared prefix is a multiple."""
        return math.lcm(self.tile_tokens, self.block_size)

    @property
    def granule_tiles(self) -> int:
        return self.granule_tokens // self.tile_tokens

    @property
    def min_granules(self) -> int:
        """Enough tiles for a span."""
        return -(-max(self.min_tiles, SPAN_TILES) // self.granule_tiles)


def _runs_whole_grids(device: torch.device) -> bool:
    """Whether all programs of the decode kernel run at once, as `grid_barrier` needs: on Hopper and later GPUs of data
    centers, two on an SM. The interpreter has no barrier."""
    if device.type != "cuda":
        return True
    return supports_pdl(device) and torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= (
        _SM_SHARED_BYTES
    )
