"""Tiny random models of transformers, saved as its own save_pretrained does, and what it generates with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from reference import Entry

VOCABULARY, NEW_TOKENS = 198, 8
# Around the edges of blocks of 4 tokens and chunks of 16, and several chunks.
PROMPTS = [[3 + (7 * i + j * j + j // 5) % 190 for j in range(n)] for i, n in enumerate([1, 4, 15, 16, 17, 40])]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By type: what differs from `_SIZES`. Each is there for something that the others do not have.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "phi3": {},  # fused tensors in the checkpoint; a plan that gathers
    "olmo2": {},  # norms after the layers, and over all heads of q and k
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},  # a scale of its own, and a head that divides
    "cohere2": {  # windows by layer, layers without positions, attention beside the MLP, scaled logits
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "head_dim": 16,
    },
    "gemma3_text": {"sliding_window": 8, "head_dim": 16},  # scaled embeddings, norms of 1 + weight, two bases of RoPE
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, **_EXPERTS},  # experts that the checkpoint has one by one
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # and under other names
    "gemma2": {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "head_dim": 16, "num_experts_per_tok": 2},  # sinks
    "deepseek_v3": {  # latent attention with its heads expanded: values narrower than keys; a dense layer, then experts
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **_EXPERTS,
    },
    "llama4_text": {  # chunks, layers without them that scale queries by positions which they count, experts
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 3,
        "attn_scale": 0.9,
        "moe_layers": [1],
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
    },
    "gemma3": {  # its text part
        "text_config": _SIZES | {"sliding_window": 8, "head_dim": 16},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    "gpt_neox": {},  # names in the checkpoint, positions of a part of a head
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},  # learned positions, transposed linears
}


def config_of(model_type: str, **changes: Any):
    from transformers import CONFIG_MAPPING

    given = MODELS.get(model_type, {})
    return CONFIG_MAPPING[model_type](**({} if "text_config" in given else _SIZES) | given | changes)


@torch.no_grad()
def random_model(config):
    """Weights that make attention matter: logits far apart, and other ones for other prompts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter.shape[-2] if "experts" in name else parameter.shape[-1]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.3 / fan_in**0.5))
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.tie_weights()
    return model


@functools.cache
def saved(model_type: str, folder: Path) -> tuple[str, list[Entry]]:
    """(its folder, what transformers generates greedily for each of `PROMPTS`)."""
    model = random_model(config_of(model_type))
    model.save_pretrained(folder / model_type)
    return str(folder / model_type), [continued(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
def continued(model, prompt: list[int]) -> Entry:
    ids, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Entry(prompt_token_ids=prompt, token_ids=ids[len(prompt) :], gaps=gaps)
