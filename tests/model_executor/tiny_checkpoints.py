"""Tiny random models, made by transformers, and loaded by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ringcore.checkpoint import Families, find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model

FAMILY_NAMES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Gemma3")
# Those that a GGUF file tells apart: a Mistral is a llama there, and its window is not in the file.
GGUF_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma3")
VOCAB_SIZE = 131  # a prime: no number of ranks divides it
MAX_LEN = 160
WINDOW = 24  # shorter than the prompts

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "attention_factor": 0.8,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "mscale": 1.2,
        "mscale_all_dim": 0.6,
    },
}
# Both kinds of layers, with a rotary embedding each, and a scale of the scores that the head size does not give.
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
GEMMA3_OPTIONS: dict[str, Any] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 40}
# The first layer has an MLP.
QWEN3_MOE_OPTIONS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}


def hf_model(family: str, rope: str = "default", seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 whose every tensor is random and matters."""
    import transformers

    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LEN,
        "rope_parameters": {"rope_theta": 5000.0, **ROPES[rope]},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "Mistral":
        options["sliding_window"] = WINDOW
    if family == "Gemma3":
        options |= GEMMA3_OPTIONS
        options["rope_parameters"] = GEMMA3_ROPES | {"full_attention": options["rope_parameters"]}
        options["layer_types"] = GEMMA3_LAYERS[: overrides.get("num_hidden_layers")]
    if family == "Qwen3Moe":
        options |= QWEN3_MOE_OPTIONS
    options |= overrides
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Gemma's norms add 1 to their weight.
                mean = 1.0 if "norm" in name and family != "Gemma3" else 0.0
                parameter.normal_(mean, 0.3 if "bias" in name or "norm" in name else 0.12)
    return model


def save_with_tensors(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """A folder of the model's configuration, and of other tensors than its own."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's files: of a mixture, each expert's own."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def hf_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def load(
    folder: Path | str,
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    load_format: str = "auto",
    seed: int = 0,
    device: str = "cpu",
    families: Families = FAMILIES,
) -> Any:
    """Our model, loaded from a folder or file."""
    files = find_model(folder, load_format)
    spec = read_model_spec(files, families)
    model = build_model(spec, tp or SingleRank(), dtype, MAX_LEN, families)
    model.bind(load_weights(model.weights(), files, seed, torch.device(device)))
    return model


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
