"""Tiny models of every format: their logits and tokens are transformers', of the weights that the codes mean."""

from __future__ import annotations

import functools

import pytest
import torch
from dense_attention import DenseRun
from quantized_checkpoints import KINDS, ROUNDS_INPUTS, save_quantized
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_logits, hf_model, load, random_ids

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import check_checkpoint
from ringcore.families import FAMILIES

IDS = random_ids(40, seed=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(kind) -> (the folder, the logits of IDS by transformers)."""

    @functools.cache
    def make(kind):
        folder = tmp_path_factory.mktemp("quantized")
        options = {"num_hidden_layers": 2, "intermediate_size": 96, "attention_bias": kind in ("int8", "w4 asym")}
        model = save_quantized(folder, hf_model("Llama", seed=3, **options), kind)
        return folder, hf_logits(model, IDS)

    return make


def logits_of(model, dtype="float32"):
    return DenseRun(model, MAX_LEN, 1, dtype).step({0: IDS})


def agree(found, expected, kind):
    """Rounded inputs may be rounded to another side here and there."""
    torch.testing.assert_close(found, expected, atol=0.1 if kind in ROUNDS_INPUTS else 2e-4, rtol=0)
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > (0.1 if kind in ROUNDS_INPUTS else 1e-3)
    assert is_clear.float().mean() > 0.5
    assert torch.equal(found.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_expanded_model(saved, kind, size):
    folder, expected = saved(kind)
    files = find_model(folder)
    check_checkpoint(files, read_model_spec(files, FAMILIES), FAMILIES)
    for found in on_all_ranks(size, lambda tp: logits_of(load(folder, tp))):
        agree(found, expected, kind)


@pytest.mark.parametrize("kind", ["w4 asym order", "awq", "w8 asym", "int8"])
def test_16_bits(saved, kind):
    """8 bits of mantissa at every step."""
    folder, expected = saved(kind)
    found = logits_of(load(folder, dtype=torch.bfloat16), "bfloat16")
    assert (found - expected).abs().mean() < (0.08 if kind in ROUNDS_INPUTS else 0.03) * expected.std()
