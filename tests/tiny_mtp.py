"""Tiny models of transformers with a layer of multi-token prediction, as published ones are stored, and what it drafts
in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

__all__ = ["MTP_MODELS", "NUM_LAYERS", "SIZES", "MtpReference", "spread"]

VOCAB, HIDDEN, NUM_LAYERS, EPS = 97, 64, 3, 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "rms_norm_eps": EPS,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MTP_MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 16, "first_k_dense_replace": 1, "use_qk_norm": True},
    "glm4_moe_lite": LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}


@torch.no_grad()
def spread(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)


class MtpReference:
    """A model of `NUM_LAYERS`, and one more of its layers between a product and norms of its own."""

    def __init__(self, model_type: str) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        options = MTP_MODELS[model_type]
        lists = {name: [*value, value[-1]] for name, value in options.items() if isinstance(value, list)}
        config = CONFIG_MAPPING[model_type](**SIZES | options | lists, num_hidden_layers=NUM_LAYERS + 1)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
            spread(self.model)
            self.own = {name: 1 + 0.1 * torch.randn(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
            self.own["eh_proj"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN)
        self.options, self.model_type = options, model_type

    def save(self, folder: Path, **fields: Any) -> str:
        """As published: the layer's tensors are those of the layer after the last."""
        self.model.save_pretrained(folder)
        place = f"model.layers.{NUM_LAYERS}"
        own = {f"{place}.{name}.weight": tensor for name, tensor in self.own.items()}
        own |= {f"{place}.embed_tokens.weight": self.model.model.embed_tokens.weight.detach().clone()}
        own |= {f"{place}.shared_head.head.weight": self.model.lm_head.weight.detach().clone()}
        save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        lists = {name: value[:-1] for name, value in config.items() if isinstance(value, list) and len(value) > 1}
        given = {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1} | fields
        config = config | lists | given
        config.pop("mlp_layer_types", None)  # by default the first layer alone has no experts
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def cut(self) -> Any:
        """The model without the layer, which is left by itself."""
        self.layer = self.model.model.layers[NUM_LAYERS]
        self.model.model.layers = self.model.model.layers[:NUM_LAYERS]
        self.model.config.num_hidden_layers = NUM_LAYERS
        return self.model

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        features = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids, found = tokens[1:], []
        for _ in range(count):
            out = self.pass_over(torch.tensor(ids), features)
            found.append(int(self.model.lm_head(self.norm("shared_head.norm", out[-1])).argmax()))
            ids, features = [*ids, found[-1]], torch.cat([features, out[-1:]])
        return found

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.own[name], EPS)

    def pass_over(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens.weight[ids].clone()
        embedded[0] = 0
        rows = F.linear(torch.cat([self.norm("enorm", embedded), self.norm("hnorm", features)], 1), self.own["eh_proj"])
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(rows[None], positions)
        out = self.layer(rows[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN)
