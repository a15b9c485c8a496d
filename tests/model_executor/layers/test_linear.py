"""Which rows and columns of the checkpoint each rank declares."""

from __future__ import annotations

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.distributed.parallel import SingleRank
from ringcore.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    merged_outputs,
    qkv_outputs,
)
from ringcore.model_executor.linear_schemes.dense import all_dense

OPTIONS = {"bias": True, "dtype": torch.float32, "scheme_of": all_dense}


class Rank(SingleRank):
    """A rank that is only asked for its place."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def heads_of(rank, size, num_heads, num_kv_heads, head_dim=10):
    slices = qkv_outputs(("q", "k", "v"), num_heads, num_kv_heads, head_dim, Rank(rank, size))
    return [(s.start // head_dim, s.length // head_dim) for s in slices]


@pytest.mark.parametrize(
    ("size", "num_heads", "num_kv_heads", "expected"),
    [
        (1, 9, 3, [[(0, 9), (0, 3), (0, 3)]]),
        (2, 14, 2, [[(0, 7), (0, 1), (0, 1)], [(7, 7), (1, 1), (1, 1)]]),
        (2, 4, 1, [[(0, 2), (0, 1), (0, 1)], [(2, 2), (0, 1), (0, 1)]]),
        (4, 8, 2, [[(2 * r, 2), (r // 2, 1), (r // 2, 1)] for r in range(4)]),
    ],
)
def test_heads_of_each_rank(size, num_heads, num_kv_heads, expected):
    assert [heads_of(rank, size, num_heads, num_kv_heads) for rank in range(size)] == expected


def test_every_query_head_is_beside_its_kv_head():
    """8 query heads, 2 KV heads: query head h reads KV head h // 4, wherever it lies."""
    for size in (1, 2, 4, 8):
        for rank in range(size):
            (first, count), (first_kv, kv_count), _ = heads_of(rank, size, 8, 2)
            group = count // kv_count
            for local in range(count):
                assert (first + local) // 4 == first_kv + local // group


def test_fused_weights_are_declared_as_data():
    layer = ColumnParallelLinear(
        "gate_up",
        merged_outputs(("gate", "up"), 12, Rank(1, 2)),
        8,
        bias=True,
        dtype=torch.float32,
        scheme_of=all_dense,
    )
    weight, bias = layer.weights()
    assert (weight.name, weight.shape, weight.nbytes) == ("gate_up.weight", (12, 8), 384)
    assert [(p.checkpoint_name, p.checkpoint_shape, p.dim, p.start, p.length, p.offset) for p in weight.parts] == [
        ("gate.weight", (12, 8), 0, 6, 6, 0),
        ("up.weight", (12, 8), 0, 6, 6, 6),
    ]
    assert [(p.checkpoint_name, p.checkpoint_shape, p.offset) for p in bias.parts] == [
        ("gate.bias", (12,), 0),
        ("up.bias", (12,), 6),
    ]


def test_row_parallel_takes_columns_and_one_bias():
    weights, inputs = torch.arange(12.0).view(3, 4), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    bias, total = torch.tensor([100.0, 200.0, 300.0]), torch.zeros(1, 3)
    for rank in range(2):
        layer = RowParallelLinear("down", "ck", 4, 3, **OPTIONS, tp=Rank(rank, 2))
        (part,) = layer.weights()[0].parts
        assert (part.dim, part.start, part.length) == (1, 2 * rank, 2)
        columns = slice(part.start, part.start + part.length)
        layer.bind({"down.weight": weights[:, columns].contiguous(), "down.bias": bias.clone()})
        total += layer(inputs[:, columns].contiguous(), NO_TOKEN_CONTEXT)
    torch.testing.assert_close(total, inputs @ weights.T + bias)


def test_entries_of_heads_are_declared_in_their_order():
    """Those of q and k are turned; v is as it is. A weight and its bias go alike."""
    order = (0, 2, 1, 3)
    outputs = qkv_outputs(("q", "k", "v"), 4, 2, 4, Rank(1, 2), order)
    for weight in ColumnParallelLinear("x", outputs, 2, **OPTIONS).weights():
        q, k, v = weight.parts
        assert (q.order, k.order, v.order) == (order, order, None)
        assert [part.run for part in weight.parts] == [4, 4, 1]
        rows = torch.arange(8)
        assert q.ordered(rows).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
        assert v.ordered(rows) is rows
        assert [(piece.start, out.tolist()) for piece, out in q.pieces(rows, 10)] == [
            (8, [0, 1, 2, 3]),
            (12, [4, 5, 6, 7]),
        ]
