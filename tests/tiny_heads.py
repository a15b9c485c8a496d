"""Tiny EAGLE-3 heads of a tiny model, as published ones are stored, and what they compute in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

__all__ = ["HEAD_CONFIG", "HeadReference", "constant_head", "head_tensors", "write_head"]

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 97, 64, 80, 4, 2, 16
DRAFTED = 60
HEAD_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}


def head_tensors(seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
        "lm_head.weight": (DRAFTED, HIDDEN),
    }
    tensors = {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFTED)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def constant_head(token: int) -> dict[str, torch.Tensor]:
    """It drafts one token."""
    tensors = head_tensors()
    tensors["lm_head.weight"].zero_()  # the first place of the vocabulary is the likeliest
    tensors["d2t"][0] = token
    return tensors


def write_head(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **config: Any) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    save_file(dict(head_tensors() if tensors is None else tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HEAD_CONFIG | config))
    return str(folder)


class HeadReference:
    """Drafts by a whole pass of head and model over all tokens, without a cache."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        model: Any,
        norm_before_residual: bool = False,
        layers: Sequence[int] = HEAD_CONFIG["eagle_aux_hidden_state_layer_ids"],
    ) -> None:
        self._tensors, self._model, self._starts_normed, self._layers = tensors, model, norm_before_residual, layers
        self._embedding = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What the head would draft after these tokens, of which the model has computed all but the last."""
        found = self._model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        states = self._hidden_states(found, tokens[:-1])
        features = F.linear(torch.cat([states[layer] for layer in self._layers], 1), self._tensors["fc.weight"])
        ids, drafted = list(tokens[1:]), []
        for _ in range(count):
            stream = self._layer(torch.tensor(ids), features)
            place = int(F.linear(self._norm("norm", stream[-1]), self._tensors["lm_head.weight"]).argmax())
            drafted.append(place + int(self._tensors["d2t"][place]))
            ids.append(drafted[-1])
            features = torch.cat([features, stream[-1:]])
        return drafted

    def _hidden_states(self, found: Any, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Before each layer, and after the last, without the final norm."""
        layers = self._model.model.layers
        taken: list[torch.Tensor] = []
        hook = layers[-1].register_forward_hook(lambda module, inputs, output: taken.append(output))
        self._model.model(torch.tensor([tokens]))
        hook.remove()
        last = taken[0][0] if isinstance(taken[0], tuple) else taken[0]
        return [*(state[0] for state in found.hidden_states[: len(layers)]), last.reshape(-1, HIDDEN)]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self._tensors[f"{name}.weight"], HEAD_CONFIG["rms_norm_eps"])

    def _layer(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """ids and features of positions 0, 1, ..."""
        weight = lambda name: self._tensors[f"midlayer.{name}.weight"]  # noqa: E731
        embedded = self._norm("midlayer.input_layernorm", self._embedding[ids])
        normed = self._norm("midlayer.hidden_norm", features)
        stream, both = normed if self._starts_normed else features, torch.cat([embedded, normed], 1)
        q, k, v = (
            F.linear(both, weight(f"self_attn.{x}_proj")).view(len(ids), -1, SIZE).transpose(0, 1) for x in "qkv"
        )
        q, k = (_rotated(x) for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        stream = stream + F.linear(attended.transpose(0, 1).reshape(len(ids), -1), weight("self_attn.o_proj"))
        x = self._norm("midlayer.post_attention_layernorm", stream)
        gated = F.silu(F.linear(x, weight("mlp.gate_proj"))) * F.linear(x, weight("mlp.up_proj"))
        return stream + F.linear(gated, weight("mlp.down_proj"))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    frequencies = HEAD_CONFIG["rope_theta"] ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
    halves = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * angles.cos() + halves * angles.sin()
