"""Decoder families with sublayers of their own, composed here by the hooks alone."""

from __future__ import annotations

import pytest
import torch
from dense_attention import DenseRun
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_logits, hf_model, load, random_ids

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA
from ringcore.model_executor.layers.linear import merged_outputs
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models.decoder import DenseDecoder
from ringcore.model_executor.models.decoder_layer import DecoderLayer, Sublayer


class SquaredMLP(Sublayer):
    """down(relu(up(x))^2), without a gate."""

    def __init__(self, build):
        size = build.spec.intermediate_size
        outputs = merged_outputs((build.in_checkpoint("mlp.up_proj"),), size, build.tp)
        self.up_proj = build.column_linear("up_proj", outputs, bias=False)
        self.down_proj = build.row_linear("down_proj", "mlp.down_proj", size, bias=False)

    def layers(self):
        return [self.up_proj, self.down_proj]

    def __call__(self, norm, hidden, inputs):
        tokens = inputs.ctx.tokens
        return self.down_proj(self.up_proj.after_norm(norm, hidden, tokens).relu_().square_(), tokens)


class SquaredDecoder(DenseDecoder):
    family = LLAMA

    def build_layer(self, build):
        norms = build.norm("input_norm", "input_layernorm"), build.norm("mlp_norm", "post_attention_layernorm")
        return DecoderLayer(norms[0], build.self_attention(), norms[1], SquaredMLP(build))


class ParallelLayer(DecoderLayer):
    """Attention and MLP of the same input."""

    def __call__(self, hidden, inputs):
        contributions = self.self_attention(self.input_norm, hidden, inputs), self.mlp(self.mlp_norm, hidden, inputs)
        hidden.rows.add_(contributions[0]).add_(contributions[1])


class ParallelDecoder(SquaredDecoder):
    def build_layer(self, build):
        layer = super().build_layer(build)
        return ParallelLayer(layer.input_norm, layer.self_attention, layer.mlp_norm, layer.mlp)


class TheirSquaredMLP(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)) ** 2)


def their_parallel_forward(layer):
    def forward(hidden_states, **arguments):
        attended = layer.self_attn(layer.input_layernorm(hidden_states), **arguments)[0]
        return hidden_states + attended + layer.mlp(layer.post_attention_layernorm(hidden_states))

    return forward


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [SquaredDecoder, ParallelDecoder])
def test_a_family_with_its_own_layers(tmp_path, kind, size):
    hf = hf_model("Llama", num_hidden_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in hf.model.layers:
            layer.mlp = TheirSquaredMLP(hf.config).eval()
            if kind is ParallelDecoder:
                layer.forward = their_parallel_forward(layer)
    hf.save_pretrained(tmp_path)
    files, ids = find_model(tmp_path), random_ids(30)
    spec = read_model_spec(files, FAMILIES)

    def logits(tp):
        model = kind(spec, tp, torch.float32, MAX_LEN, all_dense)
        model.bind(load_weights(model.weights(), files, 0, torch.device("cpu")))
        run = DenseRun(model, MAX_LEN, 1)
        return torch.cat([run.step({0: ids[:25]}), run.step({0: ids[25:26]}), run.step({0: ids[26:]})])

    expected = hf_logits(hf, ids)
    for found in on_all_ranks(size, logits):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


class SeparateLayer(DecoderLayer):
    """Takes the contributions as tensors, and adds them itself."""

    def __call__(self, hidden, inputs):
        hidden.rows.add_(self.self_attention(self.input_norm, hidden, inputs))
        hidden.rows.add_(self.mlp(self.mlp_norm, hidden, inputs))


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_a_contribution_is_what_is_added(checkpoint, family):
    hf, folder = checkpoint(family)
    model, ids = load(folder), random_ids(30)
    model.layers = [
        SeparateLayer(layer.input_norm, layer.self_attention, layer.mlp_norm, layer.mlp) for layer in model.layers
    ]
    found = DenseRun(model, MAX_LEN, 1).step({0: ids})
    torch.testing.assert_close(found, hf_logits(hf, ids), atol=1e-4, rtol=1e-5)
