"""Stages of a model, one after the other, compute exactly what the whole model does, and each has its own tensors."""

from __future__ import annotations

import pytest
import torch
from staged_models import logits_of, stages_of
from test_gguf_causal_lm import random_file
from transformers_models import saved

from ringcore.errors import ModelLoadError

IDS = [3 + (7 * j * j + j) % 190 for j in range(24)]
# By type: how it is computed, and the layers of three stages.
NATIVE = ("llama", "gemma3_text")  # a head that is the embedding; two kinds of layers in groups
OTHERS = ("gpt2", "llama4_text", "cohere2", "deepseek_v3")  # ours and theirs, with positions of their own; latents
CASES = [*((one, "native") for one in NATIVE), *((one, "transformers") for one in OTHERS)]


@pytest.mark.parametrize(("model_type", "model_impl"), CASES)
def test_stages_are_the_model(tmp_path, model_type, model_impl, is_long):
    folder = saved(model_type, tmp_path).path
    (whole,) = stages_of(folder, model_impl, 1)
    expected = logits_of([whole], IDS, 17)
    names = {weight.name for weight in whole.weights()}
    for num_stages in (2, 3) if is_long else (3,):
        stages = stages_of(folder, model_impl, num_stages)
        assert torch.equal(logits_of(stages, IDS, 17), expected)
        assert [layer.name for stage in stages for layer in stage.attention_layers] == [
            layer.name for layer in whole.attention_layers
        ]
        assert {weight.name for stage in stages for weight in stage.weights()} == names
        for stage in stages:
            own, elsewhere = ({weight.name for weight in some} for some in (stage.weights(), stage.elsewhere))
            assert own | elsewhere == names
            assert not own & elsewhere
            assert sum(weight.nbytes for weight in stage.weights()) < sum(w.nbytes for w in whole.weights()) * 0.8


def test_a_packed_table_is_in_the_first_stage_and_the_last_where_the_head_is_tied_to_it(tmp_path):
    path, _ = random_file(tmp_path, "llama", "Q8_0")
    (whole,) = stages_of(path, "transformers", 1, "packed")
    stages = stages_of(path, "transformers", 3, "packed")
    assert torch.equal(logits_of(stages, IDS, 17), logits_of([whole], IDS, 17))
    table = "model.embed_tokens.weight"
    kinds = [{weight.dtype for weight in stage.weights() if weight.name == table} for stage in stages]
    assert kinds == [{torch.uint8}, set(), {torch.uint8}]


def skips(monkeypatch, place: str | None) -> None:
    """Has a Llama read the first layer's output elsewhere too: in the angles of later layers, in their hidden states,
    in the body's result; or nowhere."""
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

    first: list[torch.Tensor] = []
    forward = LlamaModel.forward

    def layer(self, hidden, **kwargs):
        if first and place == "angles":
            cos, sin = kwargs["position_embeddings"]
            kwargs["position_embeddings"] = cos + first[0][..., : cos.shape[-1]], sin
        if first and place == "hidden":
            hidden = hidden + first[0]
        out = nn.Module.__call__(self, hidden, **kwargs)
        first.append(out)
        return out

    def body(self, *args, **kwargs):
        first.clear()
        out = forward(self, *args, **kwargs)
        if place == "result":
            out.last_hidden_state = out.last_hidden_state + first[0]
        return out

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", layer)
    monkeypatch.setattr(LlamaModel, "forward", body)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("angles", "reads more of earlier layers"),
        ("hidden", "is not given the output of the layer before"),
        ("result", "are of several layers"),
    ],
)
def test_a_body_whose_layers_are_no_chain_is_refused(tmp_path, monkeypatch, place, reason):
    folder = saved("llama", tmp_path).path
    skips(monkeypatch, None)
    assert len(stages_of(folder, "transformers", 2)) == 2
    monkeypatch.undo()
    skips(monkeypatch, place)
    with pytest.raises(ModelLoadError, match=reason):
        stages_of(folder, "transformers", 2)
