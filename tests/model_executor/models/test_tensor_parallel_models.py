"""A model split over ranks computes what it computes on one."""

from __future__ import annotations

import pytest
import torch
from dense_attention import DenseRun
from thread_tp import on_all_ranks
from tiny_checkpoints import FAMILY_NAMES, MAX_LEN, VOCAB_SIZE, load, random_ids

STEPS = [random_ids(30, seed=1), random_ids(1, seed=2), random_ids(5, seed=3)]


def logits(folder, tp=None, **options):
    run = DenseRun(load(folder, tp, **options), MAX_LEN, 1)
    return torch.cat([run.step({0: ids}) for ids in STEPS])


def assert_same_on_ranks(folder, size, **options):
    alone = logits(folder, **options)
    ranks = on_all_ranks(size, lambda tp: logits(folder, tp, **options))
    assert ranks[0].shape == (36, VOCAB_SIZE)
    torch.testing.assert_close(ranks[0], alone, atol=1e-4, rtol=0)
    for other in ranks[1:]:
        assert torch.equal(other, ranks[0])  # every rank samples by itself, so the bits must be the same


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_two_ranks(checkpoint, family, tied):
    assert_same_on_ranks(checkpoint(family, tie_word_embeddings=tied)[1], 2)


def test_biases_are_added_once(checkpoint):
    assert_same_on_ranks(checkpoint("Llama", attention_bias=True, mlp_bias=True)[1], 2)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Gemma3"])
def test_more_ranks_than_kv_heads(checkpoint, family, kv_heads):
    """KV heads are replicated, and 131 tokens over 4 ranks are padded."""
    assert_same_on_ranks(checkpoint(family, num_key_value_heads=kv_heads)[1], 4)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(checkpoint):
    assert_same_on_ranks(checkpoint("Qwen3", tie_word_embeddings=True)[1], 2, load_format="dummy", seed=5)
