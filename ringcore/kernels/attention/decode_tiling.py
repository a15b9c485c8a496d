"""The tiles of split-KV decode attention, how many programs run at once, and which kernel it is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringcore.kernels.attention.page_layout import padded_head_size

__all__ = ["DecodeTiling"]

_TILE_BYTES = 16 << 10  # of keys, and as many of values: with two pipeline stages three programs fit on an SM
_FEW_SEQS = 4  # up to here a step is short: ramp-up and combine dominate
_SOME_SEQS = 32
_MANY_SEQS = 128
_WARP_WIDTHS = (64, 128)  # head sizes
_HOPPER = 9  # of a compute capability
_WIDE_TOKEN, _FEW_ROWS = 128, 8  # bytes of a key in FP8, rows of a tile: up to them two warps have enough registers
_SOME_ROWS = 16  # of a tile of `warp_split_decode`, at most


class DecodeTiling(NamedTuple):
    """Tile shape and launch parameters of the decode kernel, chosen without knowing any sequence length."""

    tile_tokens: int  # keys and values of one iteration
    num_warps: int
    stages: int  # pipeline stages; a load whose address is loaded has one fewer
    programs_per_sm: int
    min_tiles: int  # of a range: shorter ones save less reading than their combine costs
    partials_per_round: int  # partials of a work item that the combine loads together
    rows: int = 8  # of a tile of queries, at least
    by_warps: bool = False  # by `warp_split_decode`
    whole_tiles: int = 0  # of a work item, which is not split up to them where each split has a program
    # Of an even range, what programs that follow those that run at once take: multiprocessors differ by up to a fifth
    # in how fast they read, so the faster ones have most of these. 0: there are none.
    tail_percent: int = 0

    @classmethod
    def choose_by_warps(
        cls,
        num_seqs: int,
        sizes: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        group: int,
        device: torch.device,
    ) -> DecodeTiling | None:
        """For `warp_split_decode`. sizes: of a key and of a value of a head. dtypes: of queries, and of the cache.
        None: it does not serve these.

        Microseconds that attention adds to a layer of a CUDA graph (QKV product, rotation, output projection) of
        Qwen3-4B on an H200, first by `choose`:

            | tiling             | 1 x 150 | 4 x 550 | 8 x 550 | 16 x 550 | 32 x 550 | 1 x 2,500 | 8 x 1,300 |
            | `choose`           |     5.2 |     7.1 |    10.4 |     14.8 |     21.2 |       9.1 |      16.1 |
            | (64, 4, 3, 1, 3)   |     3.0 |     5.5 |     8.1 |     11.2 |     23.8 |       7.5 |      14.1 |
            | (64, 4, 3, 2, 2)   |     4.5 |     7.1 |     7.4 |     11.7 |     18.9 |       9.8 |      13.8 |
            | (128, 8, 3, 1, 2)  |     4.0 |     5.8 |     8.7 |     11.8 |     23.0 |       8.6 |      13.9 |

        These are of the kernel without shared prefixes, over several calls. Two stages in place of three take 1% less
        with 32 sequences and up to 23% more elsewhere; two warps are slower in most cases. With one short sequence a
        range of fewer tiles than that context has costs more to combine than it saves (whole_tiles), while 1 x 384 and
        1 x 640 take 4.0 and 4.3 us in ranges of two tiles or more, 4.2 and 5.8 of three, 3.8 and 4.4 of one (32 query
        heads; with 8 for each of 4 KV heads ranges of one take 5.8 for 1 x 640, of two 4.5).

        FP8:

            | tiling           | 1 x 384 | 8 x 550 | 32 x 550 | 256 x 1,000 | 8 x 32,768 |
            | `choose`         |     8.1 |     8.6 |     16.3 |         144 |        148 |
            | (64, 4, 6, 1, 2) |     3.9 |     7.2 |     18.2 |         182 |            |
            | (64, 4, 4, 2, 2) |     4.5 |     6.9 |     12.3 |         140 |        136 |
            | (64, 4, 2, 3, 2) |     4.8 |     8.0 |     13.8 |         137 |        143 |

        A tail of ranges, of 10% of an even one, in bfloat16, without and with: 256 x 1,000 tokens 248.1 and 243.1 us,
        256 x 550 144.3 and 141.0, 256 x 300 to 800 150.2 and 146.1, 4 KV heads 134.3 and 131.4, 128 x 550 75.8 and
        75.3, 64 x 550 41.7 and 43.1. Two waves, of 7 and 3%, are no better. In FP8 256 x 1,000 take 137.0 and 138.8.

        Heads of 64 have tiles of half the bytes: a step of Llama-3.2-1B with 64 rows of 1,150 tokens takes 1.58 ms with
        two programs an SM, 1.50 with three, 1.57 with four; with 256 rows 2.93, 2.86 and 2.97. 16 query heads for each
        of 2 KV heads (GLM-4-9B): by `choose` 5.31 and 6.49 ms with 8 and 64 rows, with two programs an SM of two stages
        5.10 and 6.35, one of five 5.04 and 6.30; with 256 rows 11.4 and 11.5.

        The last two columns are of pages with the exponents behind each head's codes. With all at the end of a page
        they are 139 and 135 by `choose`, 138 and 134 by (64, 4, 4, 2, 2).
        """
        width, v_width = sizes
        fits = width == v_width in _WARP_WIDTHS and dtypes[0].itemsize == 2 and group <= _SOME_ROWS
        if not (fits and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER):
            return None  # other GPUs may have less shared memory, and it was measured on none
        rows, is_fp8 = _FEW_ROWS if group <= _FEW_ROWS else _SOME_ROWS, dtypes[1].itemsize == 1
        if num_seqs <= _FEW_SEQS:
            stages = (6 if is_fp8 else 3) * 128 // width
            return cls(64, 4, stages, 1, 2, 16, rows, by_warps=True, whole_tiles=3)
        tail_percent = 10 if num_seqs >= _MANY_SEQS and not is_fp8 else 0
        programs, stages = 2, (4 if is_fp8 else 3) * 128 // width
        if not is_fp8 and rows == _SOME_ROWS:  # of which the sums of the warps take the place of a stage
            programs, stages = (2, 2 * 128 // width) if num_seqs >= _MANY_SEQS else (1, 5 * 128 // width)
        elif not is_fp8 and width == _WARP_WIDTHS[0]:
            programs, stages = 3, 4
        # A kernel has one carve-out, so these are not partials_per_round of the other.
        return cls(64, 4, stages, programs, 2, 4, rows, by_warps=True, whole_tiles=3, tail_percent=tail_percent)

    @classmethod
    def choose(
        cls, num_seqs: int, head_size: int, dtype: torch.dtype, *, group: int = 1, rows: int = _FEW_ROWS
    ) -> DecodeTiling:
        """For at most `num_seqs` sequences over caches of `dtype`. group: query heads of a KV head. Measured on H200s.
        Microseconds of one layer of 32 query heads and 8 KV heads of size 128, in bfloat16:

            | tiling           | 1 x 640 | 4 x 640 | 8 x 640 | 32 x 1,152 | 256 x 1,000 | 1 x 32,768 | 8 x 32,768 |
            | (64, 4, 3, 1, 2) |     5.3 |     6.9 |     9.1 |            |             |       40.3 |        298 |
            | (64, 4, 3, 2, 2) |     5.9 |     8.4 |     9.8 |       40.0 |         251 |       44.2 |        252 |

        Tiles of 32 tokens, of 128, or of 8 warps, one more pipeline stage and three programs per SM are not faster.
        Programs of two warps, four per SM, take 67.1 in place of 70.0 for 64 x 1,000 tokens, where each KV head of a
        sequence is one program's; but two warps have no tensor cores for shared prefixes. With few sequences each has
        many partials, which are combined eight per round: one per round costs 1.4% of a Qwen3-8B pass and 6.7% of a
        Qwen3-0.6B pass at 1 x 640 tokens, 4.4% and 14% at 1 x 2,500 tokens; sixteen are no better. More sequences have
        fewer partials each: four per round gain 0.6% and 3% at 8 x 400 tokens. Ranges of one tile, not two, are 1 us
        faster for 1 x 384 tokens alone, 1 us slower for 1 x 1,300, and no faster in passes.

        FP8 (bytes): a tile is a chain of conversions and reductions, so small programs run side by side.

            | tiling            | 1 x 640 | 4 x 640 | 8 x 640 | 32 x 1,152 | 256 x 1,000 | 1 x 32,768 | 8 x 32,768 |
            | (128, 4, 3, 1, 2) |     6.6 |     7.2 |     9.3 |       36.3 |         233 |       35.4 |        224 |
            | (128, 4, 3, 2, 2) |     7.2 |     8.4 |     9.5 |       26.1 |         151 |       31.1 |        151 |
            | (128, 2, 2, 4, 2) |         |         |         |       29.0 |         146 |       42.0 |        143 |

        One program on an SM is faster for short contexts and much slower for long ones, for which caches are in FP8.
        """
        token_bytes = padded_head_size(head_size) * dtype.itemsize
        is_fp8, is_few = dtype.itemsize == 1, num_seqs <= _FEW_SEQS
        tile_tokens = max(16, min(128 if is_fp8 else 64, _TILE_BYTES // token_bytes))
        if is_fp8 and num_seqs > _SOME_SEQS and token_bytes <= _WIDE_TOKEN and max(group, rows) <= _FEW_ROWS:
            return cls(tile_tokens, 2, 2, 4, 2, 4, rows)
        programs_per_sm = 1 if is_few and not is_fp8 else 2
        return cls(tile_tokens, 4, 3, programs_per_sm, 2, 8 if is_few else 4, rows)
