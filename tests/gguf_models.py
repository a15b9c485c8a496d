"""Writes models of transformers as GGUF files, in the way of llama.cpp's converter, and reads them by transformers' own
GGUF loader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf_blocks import encoded
from safetensors.torch import load_file


def write_gguf(
    folder: Path, architecture: str, model: Any, kind: str = "F32", kinds: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The file, in the folder, into which the model is saved too. kind: of the matrices but those of `kinds`, by the
    last part of their name in the file."""
    model.save_pretrained(folder)
    path = folder / f"{architecture}-{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _header(writer, architecture, model.config)
    tensors = load_file(folder / "model.safetensors")
    for name, values in _stored(architecture, model.config, tensors).items():
        of_matrix = kinds.get(name.split(".")[-2], kind)
        kept = of_matrix if values.ndim > 1 and name != "position_embd.weight" else "F32"
        writer.add_tensor(name, encoded(values, kept), raw_dtype=gguf.GGMLQuantizationType[kept])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _header(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.n_inner if architecture == "gpt2" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if architecture in ("gpt2", "starcoder2"):
        eps = config.layer_norm_epsilon if architecture == "gpt2" else config.norm_epsilon
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gpt2":
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in ("gemma2", "qwen3moe", "minimax-m2", "gpt-oss"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture in ("llama", "phi3", "minimax-m2"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _header_of_experts_and_windows(writer, architecture, config)


def _header_of_experts_and_windows(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    if architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture in ("minimax-m2", "gpt-oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("gemma2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _stored(architecture: str, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """By GGUF name: experts of a layer in one tensor, and what else the converter of this architecture does."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for hf_name, tensor in tensors.items():
        for stem, values in _renamed(architecture, config, hf_name, tensor.numpy()):
            expert = re.search(r"\.experts\.(\d+)\.", stem)
            if expert is not None:
                stem = stem.replace(expert[0], ".experts.")
            base, _, suffix = stem.rpartition(".")
            name = f"{names.get_name(base)}.{suffix}"
            assert not name.startswith("None"), hf_name
            if expert is None:
                found[name] = values
            else:
                experts.setdefault(name, {})[int(expert[1])] = values
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _renamed(architecture: str, config: Any, name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    match architecture:
        case "llama" if ".q_proj." in name or ".k_proj." in name:
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            return [(name, values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape))]
        case "gemma2" if name.endswith("norm.weight"):
            return [(name, values + 1)]
        case "gpt2" if re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
            return [(name, values.T)]
        case "qwen2moe" if name.endswith("shared_expert_gate.weight"):
            return [(name, values[0])]
        case "minimax-m2" if name.endswith("e_score_correction_bias"):
            return [(name.replace("correction_bias", "correction.bias"), values)]
        case "gpt-oss" if ".experts." in name:
            stem, _, last = name.rpartition(".")
            proj, suffix = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
            values = values if suffix == "bias" else values.swapaxes(1, 2)
            if proj == "down_proj":
                return [(f"{stem}.{proj}.{suffix}", values)]
            return [(f"{stem}.gate_proj.{suffix}", values[:, ::2]), (f"{stem}.up_proj.{suffix}", values[:, 1::2])]
        case "gpt-oss" if name.endswith("sinks"):
            return [(f"{name}.weight", values)]
    return [(name, values)]


def loaded_by_transformers(path: str, model: Any) -> Any:
    """The model with the tensors that transformers reads from the file; what its `from_pretrained(gguf_file=...)` does,
    which asks for the package accelerate."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    lacking = model.load_state_dict(tensors, strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= set(model.all_tied_weights_keys)
    model.tie_weights()
    return model
