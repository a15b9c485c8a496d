"""The vocabulary split over ranks: which rows are whose, where padding is, what comes out."""

from __future__ import annotations

import pytest
import torch
from thread_tp import on_all_ranks

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint import ModelFiles
from ringcore.distributed.parallel import SingleRank
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.loader import load_weights

DUMMY = ModelFiles("dummy", "/nowhere", None, [], "/nowhere")
HIDDEN = 16


def bound(tp, vocab_size, tied, dtype=torch.float32):
    options = {"dtype": dtype, "tp": tp}
    embedding = VocabParallelEmbedding("embed", "model.embed", vocab_size, HIDDEN, **options)
    tie = embedding if tied else None
    head = ParallelLMHead("head", "head", vocab_size, HIDDEN, **options, tied=tie, scheme_of=all_dense)
    tensors = load_weights([*embedding.weights(), *head.weights()], DUMMY, 3, torch.device("cpu"))
    embedding.bind(tensors)
    head.bind(tensors)
    assert not tensors
    return embedding, head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab_size", "size"), [(10, 2), (11, 2), (5, 4), (13, 4)])
def test_ranks_agree_with_one(vocab_size, size, tied):
    ids = torch.arange(vocab_size).repeat(2)
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0))

    def both_ends(tp):
        embedding, head = bound(tp, vocab_size, tied)
        return embedding(ids), head(hidden, NO_TOKEN_CONTEXT), embedding.table

    looked_up, logits, table = both_ends(SingleRank())
    assert torch.equal(looked_up, table[ids])
    assert logits.shape == (7, vocab_size)
    for ours, our_logits, _ in on_all_ranks(size, both_ends):
        assert torch.equal(ours, looked_up)
        torch.testing.assert_close(our_logits, logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "size"), [(10, 1), (10, 2), (11, 2), (13, 4)])
def test_logits_go_where_they_are_wanted(vocab_size, size, dtype):
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)

    def both_ways(tp):
        _, head = bound(tp, vocab_size, False, dtype)
        place = torch.full((5, vocab_size), -7.0)
        returned = head(hidden, NO_TOKEN_CONTEXT, place[:3])
        return head(hidden, NO_TOKEN_CONTEXT), returned, place

    for logits, returned, place in on_all_ranks(size, both_ways) if size > 1 else [both_ways(SingleRank())]:
        assert logits.dtype == torch.float32
        assert returned.data_ptr() == place.data_ptr()
        assert torch.equal(returned, logits)
        assert torch.equal(place[:3], logits)
        assert (place[3:] == -7).all()


def test_padding_is_zero_and_at_the_end():
    tables = on_all_ranks(4, lambda tp: bound(tp, 5, True)[0].table)
    assert [table.shape for table in tables] == [(2, HIDDEN)] * 4
    assert [bool(row.any()) for table in tables for row in table] == [True] * 5 + [False] * 3


def test_a_tied_head_follows_the_table():
    embedding, head = bound(SingleRank(), 6, tied=True)
    logits = head(torch.eye(HIDDEN), NO_TOKEN_CONTEXT)
    torch.testing.assert_close(logits.T, embedding.table, atol=1e-6, rtol=0)
