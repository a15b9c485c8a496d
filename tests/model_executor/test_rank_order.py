"""Sums over ranks in one order, whatever the shape."""

from __future__ import annotations

import torch
from thread_tp import on_all_ranks

from ringcore.distributed.rank_order import RankOrdered


def test_a_row_is_summed_alike_beside_any_others() -> None:
    parts = torch.randn(3, 9, 7, generator=torch.Generator().manual_seed(1)) * 1000

    def summed(rows: slice) -> list[torch.Tensor]:
        return on_all_ranks(3, lambda tp: RankOrdered(tp).all_reduce(parts[tp.rank, rows]))

    expected = (parts[0] + parts[1]) + parts[2]
    for rows in (slice(0, 9), slice(4, 5), slice(2, 8)):
        assert all(torch.equal(found, expected[rows]) for found in summed(rows))


def test_sixteen_bits_are_rounded_once() -> None:
    parts = torch.tensor([[256.0], [0.75], [0.75]]).bfloat16()  # 256.75 would be 256
    (found, *_) = on_all_ranks(3, lambda tp: RankOrdered(tp).all_reduce(parts[tp.rank, None]))
    assert found.item() == 258.0
