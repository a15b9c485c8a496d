"""What Gemma 3 does besides the shared decoder, in the dtypes where it shows."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import hf_model, load

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_scaled_as_transformers_does(tmp_path, dtype):
    """By a root that the dtype rounds: 8.485 is 8.5 in bfloat16."""
    hf = hf_model("Gemma3", hidden_size=72, num_hidden_layers=1).to(dtype)
    hf.save_pretrained(tmp_path)
    ids = torch.tensor([0, 7, 130, 7])
    with torch.inference_mode():
        assert torch.equal(load(tmp_path, dtype=dtype).embed(ids), hf.model.embed_tokens(ids))


def test_the_table_itself_is_not_scaled(tmp_path):
    """The logits are of the table as it is in the checkpoint."""
    hf = hf_model("Gemma3", tie_word_embeddings=True)
    hf.save_pretrained(tmp_path)
    model = load(tmp_path)
    for _ in range(2):
        model.embed(torch.tensor([3, 4]))
    assert torch.equal(model.embed_tokens.table, hf.model.embed_tokens.weight)


def test_each_kind_of_layer_has_its_angles(tmp_path):
    hf = hf_model("Gemma3", "linear")
    hf.save_pretrained(tmp_path)
    model = load(tmp_path)
    positions = torch.tensor([0, 1, 50, 159])
    assert [layer.self_attention.inner.rotary for layer in model.layers] == [1, 0, 1]
    for which, kind in enumerate(["full_attention", "sliding_attention"]):
        cos, sin = hf.model.rotary_emb(torch.ones(1), positions[None], kind)
        ours = model.rotaries[which](positions).angles[:, 0]
        torch.testing.assert_close(ours.real, cos[0, :, :8], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours.imag, sin[0, :, :8], atol=1e-6, rtol=0)


def test_scores_are_scaled_by_their_own_number(tmp_path):
    hf = hf_model("Gemma3", query_pre_attn_scalar=168, attention_bias=False)
    hf.save_pretrained(tmp_path)
    assert [layer.scale for layer in load(tmp_path).attention_layers] == [168**-0.5] * 3
