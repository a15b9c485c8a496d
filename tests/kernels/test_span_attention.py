"""Batch-invariant attention by spans: a decode has the bits of a prompt's token, however its context is split over
programs; and the tile scheduler whose ranges begin where spans do."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_triton import multiply_in_order
from paged_batch import PagedBatch, assert_close

from ringcore.errors import ConfigError
from ringcore.kernels.attention import span_agreement
from ringcore.kernels.attention.attention_spans import local_shift
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
from ringcore.kernels.attention.paged_attention_reference import paged_attention_prefill_reference
from ringcore.kernels.attention.span_agreement import HeadShape, decode_rows
from ringcore.kernels.attention.span_scheduler import SpanTileScheduler, span_tiling
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN
from ringcore.kernels.launch.precompile import NotLaunchedError

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes the interpreter too long")
LENS = [(3, 150), (2, 330)]  # (tokens in the step, all tokens): contexts of 2 to 6 spans
MANY = [(40, 1500), (70, 640), (1, 9000), *[(1, 100 * i) for i in range(1, 30)]]
QWEN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}


@pytest.mark.parametrize(
    ("dtype", "lengths", "programs", "features"),
    [
        (torch.float32, LENS, (1, 7), {}),
        (torch.float32, LENS, (4,), {"chunk": 100, "sinks": True}),
        (torch.float32, LENS, (3,), {"head_size": 24, "v_head_size": 16}),
        (torch.float16, LENS, (7,), {"window": 100, "sinks": True, "softcap": 30.0}),
        pytest.param(torch.bfloat16, MANY, (None, 17, 264), QWEN, marks=needs_gpu),
        pytest.param(torch.bfloat16, MANY, (None, 31), QWEN | {"window": 1000, "sinks": True}, marks=needs_gpu),
        pytest.param(torch.float16, MANY, (None, 31), {"head_size": 256, "softcap": 50.0}, marks=needs_gpu),
        pytest.param(torch.float32, MANY, (None, 31), {"head_size": 64, "chunk": 1000}, marks=needs_gpu),
    ],
)
def test_a_decode_has_the_bits_of_a_prompt(device, dtype, lengths, programs, features: dict[str, Any]) -> None:
    features = dict(features)
    sinks, softcap = features.pop("sinks", False), features.pop("softcap", None)
    reach = {"window": features.get("window"), "chunk": features.get("chunk")}
    batch = PagedBatch.make(lengths, device=device, dtype=dtype, **{"head_size": 16} | features)
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None}
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.scale)
    of_prompt = paged_attention_prefill(*inputs, max_query_len=None, **reach, **scores, out=batch.poisoned_out())
    assert_close(of_prompt, paged_attention_prefill_reference(*inputs, max_query_len=99, **reach, **scores))

    tokens = [(i, seq_len - n + j + 1) for i, (n, seq_len) in enumerate(lengths) for j in range(n)]
    lens = torch.tensor([n for _, n in tokens], dtype=torch.int32, device=device)
    table = batch.block_table[torch.tensor([i for i, _ in tokens], device=device)]
    _, num_heads, head_size = batch.query.shape
    page = PageLayout.of(batch.kv_cache, head_size)
    shape = HeadShape(num_heads, page.num_kv_heads, page.block_size, head_size, page.v_head_size, **reach)
    tiling = span_tiling(len(lens), head_size, dtype, decode_rows(shape, dtype, device))
    for num_programs in programs:
        scheduler = SpanTileScheduler.allocate(
            *(num_heads, page.num_kv_heads, head_size, tiling, device),
            v_head_size=page.v_head_size,
            num_programs=num_programs,
            **reach,
        )
        scheduler.plan(lens)
        out = batch.poisoned_out()
        paged_attention_decode(batch.query, batch.kv_cache, table, lens, scheduler, batch.scale, **scores, out=out)
        assert torch.equal(out, of_prompt), num_programs
        assert (scheduler.partials == UNWRITTEN.value).all(), "the workspace is not reset for the next launch"


SHAPE = HeadShape(num_heads=4, num_kv_heads=2, block_size=16, head_size=16, v_head_size=16, window=None, chunk=None)


def test_a_device_is_asked_which_tiles_agree(device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_agreement, "_QUERIES", 4)
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", multiply_in_order)
    ask = functools.partial(span_agreement._agreeing_rows.__wrapped__, SHAPE, torch.float16, device)
    assert ask((16, 64)) in (16, 64)

    def attend_as(rows_that_agree: int) -> None:
        def decode(*args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
            return out.fill_(1.0 if args[4].tile_rows == rows_that_agree else 2.0)

        monkeypatch.setattr(span_agreement, "paged_attention_decode", decode)

    monkeypatch.setattr(span_agreement, "paged_attention_prefill", lambda *args, out, **options: out.fill_(1.0))
    attend_as(64)
    assert ask((16, 64)) == 64
    attend_as(0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ConfigError, match=r"deterministic=True: 4 heads of 16 numbers in torch\.float16 on a GPU are"):
        ask((16, 64))
    monkeypatch.setattr(span_agreement, "paged_attention_prefill", lambda *args, **options: None)
    with pytest.raises(NotLaunchedError):
        ask((16, 64))


# ---------------------------------------------------------------------------------------------------------------
# The schedule.

TILING = DecodeTiling(tile_tokens=64, num_warps=4, stages=3, programs_per_sm=2, min_tiles=2, partials_per_round=4)


def shift_of(tile: int, local: int) -> int:
    return local or max(tile.bit_length() - 5, 1)


def is_start(tile: int, local: int) -> bool:
    return tile % (1 << shift_of(tile, local)) == 0


def num_spans(begin: int, end: int, local: int) -> int:
    """Of the tiles from a span's first on."""
    return sum(is_start(tile, local) for tile in range(begin + 1, end)) + 1


def check_schedule(lens: list[int], num_programs: int, num_kv_heads: int, window: int | None) -> float:
    """-> the tiles of the longest range, relative to equal ones."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = num_kv_heads, num_kv_heads, 16
    scheduler = SpanTileScheduler.allocate(*shape, TILING, device, window=window, num_programs=num_programs)
    scheduler.plan(torch.tensor(lens, dtype=torch.int32, device=device))
    local = scheduler.local_shift
    firsts = [0 if window is None else max(0, n - window) // 64 for n in lens]
    items = [
        (sequence, head, first, max(1, -(-n // 64) - first))
        for sequence, (n, first) in enumerate(zip(lens, firsts, strict=True))
        for head in range(num_kv_heads)
    ]
    left = iter(items)
    sequence, head, first, tiles = next(left)
    at = owner = owned = longest = 0
    for program, record in enumerate(scheduler.tile_ranges.tolist()):
        count = record[3]
        longest = max(longest, count)
        assert count >= 0
        if count == 0:
            continue
        assert record[:3] == [sequence, head, at]
        assert record[4] == lens[sequence]
        assert at == 0 or is_start(first + at, local)
        if at > 0:
            assert (record[5], record[6]) == (owner, num_spans(0, first + owned + 1, local) - 1)
        while count:
            if at == 0:
                owner, owned = program, min(count, tiles)
            taken = min(count, tiles - at)
            at, count = at + taken, count - taken
            if at == tiles:
                if owned < tiles:
                    num_partials = 1 + num_spans(first + owned, first + tiles, local)
                    assert num_partials <= (program - owner) * scheduler.span_slots, "slots of other items"
                sequence, head, first, tiles = next(left, (0, 0, 0, 0))
                at = 0
    assert tiles == 0, "a work item has no program"
    return longest / max(sum(tiles for *_, tiles in items) / num_programs, TILING.min_tiles)


@pytest.mark.parametrize(
    ("lens", "num_programs", "num_kv_heads", "most"),
    [
        ([640], 132, 8, 1.0),
        ([1152] * 32, 264, 8, 1.04),
        ([*range(100, 2000, 30)], 40, 4, 1.1),
        ([32768], 132, 8, 1.1),
        ([131072, *[600] * 60], 40, 2, 1.5),
        ([131072] * 20, 24, 2, 1.3),
        ([0, 0, 900], 17, 1, 2.1),
    ],
)
def test_ranges_are_even(lens: list[int], num_programs: int, num_kv_heads: int, most: float) -> None:
    assert check_schedule(lens, num_programs, num_kv_heads, None) <= most


def test_any_schedule_is_complete() -> None:
    draw = random.Random(3)
    for _ in range(30):
        longest = draw.choice([100, 1000, 5000, 40000, 200000])
        lens = [draw.randint(0, longest) for _ in range(draw.choice([1, 2, 5, 40]))]
        window = draw.choice([None, None, 100, 1000, 5000])
        check_schedule(lens, draw.choice([1, 2, 5, 16]), draw.choice([1, 2, 8]), window)


def test_spans_of_a_window_are_of_one_length() -> None:
    assert [local_shift(reach, 64) for reach in (None, 1, 2048, 2049, 4096, 8192)] == [0, 1, 1, 2, 2, 3]
