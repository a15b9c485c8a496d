"""Tiny random models of transformers, saved as its own save_pretrained does, and what it generates with them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference import Entry
from tiny_configs import VOCABULARY, tiny_config

from ringcore.model_executor.models.transformers.known_types import architecture_of

__all__ = ["MODELS", "NEW_TOKENS", "PROMPTS", "VOCABULARY", "Saved", "are_decisive", "saved", "write_config"]

NEW_TOKENS = 8
_NUM_DRAWS = 4


def prompts(*lengths: int) -> list[list[int]]:
    return [[3 + (7 * i + j * j + j // 5) % 190 for j in range(n)] for i, n in enumerate(lengths)]


# Around the edges of blocks of 4 tokens and chunks of 16, and several chunks.
PROMPTS = prompts(1, 4, 15, 16, 17, 40)

SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# By type: what differs from its tiny configuration. The types are the sample; each is there for something that the
# others do not have.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "phi3": {},  # fused tensors in the checkpoint; a plan that gathers
    "olmo2": {},  # norms after the layers, and over all heads of q and k
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},  # a scale of its own, and a head that divides
    "cohere2": {  # windows by layer, layers without positions, attention beside the MLP, scaled logits
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3_text": {  # scaled embeddings, norms of 1 + weight, two bases of RoPE
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {},  # experts that the checkpoint has one by one
    "mixtral": {},  # and under other names
    "gemma2": {},  # softcaps
    "gpt_oss": {},  # sinks
    "deepseek_v3": {},  # latent attention; a dense layer, then experts
    "llama4_text": {  # chunks, layers without them that scale queries by positions which they count, experts
        "num_hidden_layers": 3,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 3,
        "attn_scale": 0.9,
        "moe_layers": [1],
        "intermediate_size_mlp": 96,
    },
    "gemma3": {},  # its text part
    # The last layers read the KV cache of earlier ones; embeddings of each layer; larger heads in some.
    "gemma4_text": SHARED_KV | {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}},
    # So too, and its MLPs are cut off by a whole row's activations.
    "gemma3n_text": SHARED_KV | {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.9, 0.0] * 2},
    "gpt_neox": {},  # names in the checkpoint, positions of a part of a head
    "gpt2": {},  # learned positions, transposed linears
}


def write_config(model_type: str, folder: Path, **changes: Any) -> str:
    """The tiny configuration as a folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(model_type, **MODELS.get(model_type, {}) | changes)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture_of(model_type)]}))
    return str(folder)


@torch.no_grad()
def random_model(folder: str, seed: int = 0):
    """Weights that make attention matter: logits far apart, and other ones for other prompts."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    is_text = config.get_text_config() is config and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if is_text else AutoModelForMultimodalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter.shape[-2] if "experts" in name else parameter.shape[-1]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.3 / fan_in**0.5))
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.tie_weights()
    return model


@dataclass(frozen=True)
class Saved:
    path: str
    entries: list[Entry]  # what transformers generates greedily for each prompt, with log-probabilities
    has_plan: bool  # for tensor parallelism
    # The control, as `Entry.logprobs`: of the same tokens, where each prompt is preceded by another one as though both
    # were one sequence. Positions are right, so only the boundary is wrong.
    mixed: list[list[float]]


@functools.cache
def saved(model_type: str, folder: Path, lengths: tuple[int, ...] = tuple(map(len, PROMPTS)), **changes: Any) -> Saved:
    path = folder / model_type
    write_config(model_type, path, **changes)
    for seed in range(_NUM_DRAWS):
        model = random_model(str(path), seed)
        entries = [continued(model, prompt) for prompt in prompts(*lengths)]
        if are_decisive(entries):
            break
    model.save_pretrained(path)
    before = entries[-1].prompt_token_ids[:20]
    return Saved(str(path), entries, bool(model.tp_plan), [preceded(model, before, entry) for entry in entries])


def are_decisive(entries: list[Entry]) -> bool:
    """Whether few tokens come after one that was nearly another."""
    return sum(entry.num_decisive for entry in entries) > 0.8 * NEW_TOKENS * len(entries)


@torch.no_grad()
def continued(model, prompt: list[int]) -> Entry:
    ids, gaps, logprobs = list(prompt), [], []
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        logprobs.append(float(logits.log_softmax(-1)[best.indices[0]]))
        ids.append(int(best.indices[0]))
    return Entry(prompt_token_ids=prompt, token_ids=ids[len(prompt) :], gaps=gaps, logprobs=logprobs)


@torch.no_grad()
def preceded(model, before: list[int], entry: Entry) -> list[float]:
    """The log-probabilities of an entry's tokens after other tokens, which are no part of its sequence."""
    own = [*entry.prompt_token_ids, *entry.token_ids[:-1]]
    ids = torch.tensor([[*before, *own]])
    logits = model(
        input_ids=ids,
        position_ids=torch.tensor([[*range(len(before)), *range(len(own))]]),
        attention_mask=torch.ones_like(ids),  # else transformers would see two sequences by the positions
        use_cache=False,
    ).logits[0, -NEW_TOKENS:]
    return logits.log_softmax(-1).gather(1, torch.tensor(entry.token_ids)[:, None])[:, 0].tolist()
