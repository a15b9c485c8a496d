"""The tiles of split-KV decode attention, and how many programs run at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringcore.kernels.page_layout import padded_head_size

__all__ = ["DecodeTiling"]

_TILE_BYTES = 16 << 10  # of keys, and as many of values: with two pipeline stages three programs fit on an SM
_FEW_SEQS = 4  # up to here a step is short: ramp-up and combine dominate
_SOME_SEQS = 32
_WIDE_TOKEN, _MAX_GROUP = 128, 16  # bytes of a key, query heads


class DecodeTiling(NamedTuple):
    """Tile shape and launch parameters of the decode kernel, chosen without knowing any sequence length."""

    tile_tokens: int  # keys and values of one iteration
    num_warps: int
    stages: int  # pipeline stages; a load whose address is loaded has one fewer
    programs_per_sm: int
    min_tiles: int  # of a range: shorter ones save less reading than their combine costs
    partials_per_round: int  # partials of a work item that the combine loads together
    rows: int = 16  # of a tile of queries, at least

    @classmethod
    def choose(cls, num_seqs: int, head_size: int, dtype: torch.dtype, group: int = 1) -> DecodeTiling:
        """For at most `num_seqs` sequences over caches of `dtype`. group: query heads of a KV head. Measured on H200s,
        for 8 KV heads of size 128 in bfloat16. Microseconds per forward pass, Qwen3-8B in the first two rows,
        Qwen3-0.6B in the last two:

            | tiling          | 1 x 640 | 4 x 640 | 8 x 640 | 32 x 1,152 | 64 x 1,000 | 256 x 100 to 2,000 |
            | (64, 8, 3, 1, 2)|   3,868 |   4,756 |   4,739 |      6,137 |      7,798 |             19,675 |
            | (64, 4, 3, 2, 2)|   4,708 |   4,818 |   4,698 |      5,619 |      7,122 |             16,680 |
            | (64, 8, 3, 1, 2)|     633 |     920 |   1,100 |      2,295 |            |             11,375 |
            | (64, 4, 3, 2, 2)|     675 |     929 |   1,100 |      1,955 |            |              8,858 |

        Three programs of four warps per SM, tiles of 32 tokens, or one more pipeline stage are slower from 32 sequences
        on. With few sequences each has many partials, which are combined eight per round: one per round costs 1.4% of a
        Qwen3-8B pass and 6.7% of a Qwen3-0.6B pass at 1 x 640 tokens, 4.4% and 14% at 1 x 2,500 tokens; sixteen are no
        better. More sequences have fewer partials each: four per round gain 0.6% and 3% at 8 x 400 tokens. Ranges of
        one tile, not two, are 1 us faster for 1 x 384 tokens alone, 1 us slower for 1 x 1,300, and no faster in passes.

        FP8 (bytes): a tile is a chain of conversions and reductions, so small programs run side by side. Microseconds
        of one layer of 32 query heads:

            | tiling           | 1 x 640 | 4 x 640 | 32 x 1,152 | 256 x 1,000 | 8 x 32,768 |
            | (128, 4, 3, 2, 2)|     8.2 |     9.9 |       30.2 |         182 |        185 |
            | (64, 8, 3, 1, 2) |     6.6 |     8.4 |       59.1 |         382 |        374 |
            | (64, 2, 3, 4, 2) |     9.3 |    11.3 |       30.0 |         165 |        167 |
            | (128, 2, 2, 4, 2)|    10.9 |    11.7 |       31.9 |         152 |        153 |
        """
        token_bytes = padded_head_size(head_size) * dtype.itemsize
        if dtype.itemsize == 1:
            tile_tokens = max(16, min(128, _TILE_BYTES // token_bytes))
            if num_seqs <= _FEW_SEQS:
                return cls(max(16, tile_tokens // 2), 8, 3, 1, 2, 8)
            if token_bytes > _WIDE_TOKEN or group > _MAX_GROUP:  # two warps would have too few registers
                return cls(tile_tokens, 4, 3, 2, 2, 4)
            return cls(tile_tokens, 2, 2, 4, 2, 4) if num_seqs > _SOME_SEQS else cls(tile_tokens // 2, 2, 3, 4, 2, 4)
        tile_tokens = max(16, min(64, _TILE_BYTES // token_bytes))
        if num_seqs <= _FEW_SEQS:
            return cls(tile_tokens, 8, 3, 1, 2, 8)
        return cls(tile_tokens, 4, 3, 2, 2, 4)
