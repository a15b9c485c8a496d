"""Models of transformers written as GGUF files and loaded by ours, expanded or packed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from dense_attention import DenseRun
from gguf_models import write_gguf

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model

CPU, MAX_LEN = torch.device("cpu"), 64
IDS = [(7 * i + i * i) % 97 for i in range(40)]
HIDDEN, EXPERTS = 256, 4
SIZES = {
    "vocab_size": 97, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "num_experts_per_tok": 2, "head_dim": 64,
    "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
OF_EXPERTS = {"num_experts": EXPERTS, "moe_intermediate_size": 256, "intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, **OF_EXPERTS},
    "qwen2moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 256, **OF_EXPERTS},
    "minimax-m2": {"model_type": "minimax_m2", "num_local_experts": EXPERTS, "intermediate_size": 256},
    "phi3": {"model_type": "phi3", "intermediate_size": 256, "original_max_position_embeddings": 64},
    "starcoder2": {"model_type": "starcoder2", "intermediate_size": 256, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2", "intermediate_size": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 64,
        "final_logit_softcapping": 3.0,
    },
    "llama": {"model_type": "llama", "intermediate_size": 256, "tie_word_embeddings": True},
}  # fmt: skip


@functools.cache
def hf(architecture: str, seed: int = 1, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    options = SIZES | MODELS[architecture] | changes
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[options["model_type"]].from_dict(options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name or parameter.ndim < 2 else 0.08)
    return model


def written(folder: Path, architecture: str, kind: str, seed: int = 1, down: str | None = None, **changes: Any) -> Path:
    kinds = {"ffn_gate_inp": "F32", "ffn_down_exps": down or kind}
    folder.mkdir(exist_ok=True)
    return Path(write_gguf(folder, architecture, hf(architecture, seed, **changes), kind, kinds))


def built(path: Path, asked: str, tp: TensorParallel | None = None, **options: Any) -> Any:
    files = find_model(path)
    spec = with_gguf_weights(read_model_spec(files, FAMILIES, "transformers"), files, asked, "float32", "cpu", Host())
    return build_model(spec, tp or SingleRank(), torch.float32, MAX_LEN, **options)


def loaded(path: Path, asked: str, tp: TensorParallel | None = None, **options: Any) -> Any:
    model = built(path, asked, tp, **options)
    with pending_weights(model.weights(), find_model(path), 0, CPU, may_ignore=model.may_ignore) as tensors:
        model.bind(tensors)
    return model


def step(model: Any) -> torch.Tensor:
    return DenseRun(model, MAX_LEN, 1, device=CPU).step({0: IDS})


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=3e-4 * float(expected.abs().max()), rtol=0)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
