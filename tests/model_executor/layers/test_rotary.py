"""Frequencies against transformers' own functions, and the turned layout against the textbook's."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import ROPES, hf_model

from ringcore.checkpoint import RopeSpec
from ringcore.model_executor import ops
from ringcore.model_executor.layers.rotary import RotaryEmbedding, interleaved, inverse_frequencies


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_transformers(rope):
    reference = hf_model("Llama", rope, num_hidden_layers=1).model.rotary_emb
    fields = {"kind" if key == "rope_type" else key: value for key, value in ROPES[rope].items()}
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if "yarn" in rope else {}
    frequencies, factor = inverse_frequencies(16, RopeSpec(theta=5000.0, **defaults | fields))
    assert torch.equal(frequencies, reference.inv_freq)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-12)


def test_yarn_whose_ramp_is_a_step():
    """Both bounds on one pair: a division by zero unless it is guarded."""
    spec = RopeSpec(
        theta=1e4, kind="yarn", factor=2.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=31.0
    )
    assert inverse_frequencies(16, spec)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_turning_pairs_of_neighbours_is_turning_halves(dtype):
    head_dim, positions = 8, torch.tensor([0, 3, 41])
    rotary = RotaryEmbedding(head_dim, RopeSpec(theta=100.0), 64)
    rotary.bind(torch.device("cpu"))
    x = torch.randn(3, 5, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)

    angles = (positions[:, None] * 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim))[:, None]
    low, high = x.double().chunk(2, -1)
    expected = torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)

    ours = torch.empty(3, 9, head_dim, dtype=dtype)[:, 2:7]  # a view with other heads around it, as in qkv
    ours.copy_(x[..., interleaved(head_dim)])
    ops.apply_rotary(ours, rotary(positions).angles)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), expected[..., interleaved(head_dim)], atol=tolerance, rtol=tolerance)


def test_interleaved_puts_pairs_side_by_side():
    assert interleaved(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
