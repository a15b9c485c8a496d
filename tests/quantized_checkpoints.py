"""Quantized checkpoints: each format written by hand from a dense model, with the weights that its codes mean.

Nothing here is of the package: what it unpacks was packed by other code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

GROUP = 32
BLOCK = (32, 16)  # outputs, inputs
FP8 = torch.float8_e4m3fn


class Stored(NamedTuple):
    """One matrix: its tensors by suffix, the weights that they mean, and the scale of its inputs, if it has one."""

    tensors: dict[str, torch.Tensor]
    expanded: torch.Tensor
    input_scale: torch.Tensor | None = None


def config_of(kind: str) -> dict[str, Any]:
    """The `quantization_config`."""
    if kind == "fp8 block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    if kind.startswith("gptq"):
        bits = 8 if "8" in kind else 4
        return {
            "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": "order" in kind, "sym": False,
            "checkpoint_format": "gptq", "damp_percent": 0.1, "true_sequential": True,
        }  # fmt: skip
    weights, inputs, form = _compressed(kind)
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def _compressed(kind: str) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    args: dict[str, Any] = {"num_bits": 8, "symmetric": True, "dynamic": False, "group_size": None}
    per_token = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
    static = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}
    match kind:
        case "fp8 channel":
            floats = {"type": "float"}
            return args | floats | {"strategy": "channel"}, per_token | floats, "float-quantized"
        case "fp8 tensor static":
            floats = {"type": "float"}
            return args | floats | {"strategy": "tensor"}, static | floats, "float-quantized"
        case "int8":
            ints = {"type": "int"}
            return args | ints | {"strategy": "channel"}, per_token | ints, "int-quantized"
    options = {"num_bits": 8 if "w8" in kind else 4, "type": "int", "strategy": "group", "group_size": GROUP}
    if "channel" in kind:
        options |= {"strategy": "channel", "group_size": None}
    options |= {"symmetric": "asym" not in kind, "actorder": "group" if "order" in kind else None}
    return args | options, None, "pack-quantized"


KINDS = (
    "fp8 block", "fp8 channel", "fp8 tensor static", "int8", "w4", "w4 asym", "w4 channel", "w4 asym order",
    "w8 asym", "awq", "gptq", "gptq order", "gptq 8 order",
)  # fmt: skip
ROUNDS_INPUTS = ("fp8 block", "fp8 channel", "fp8 tensor static", "int8")


def is_quantized(kind: str, matrix: str) -> bool:
    compressed = config_of(kind)["quant_method"] == "compressed-tensors"
    return matrix.endswith("_proj") and not (compressed and matrix.endswith("layers.1.mlp.down_proj"))


def store(kind: str, weight: torch.Tensor, seed: int = 0, block: tuple[int, int] = BLOCK) -> Stored:
    """weight: [out, in] float32."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp8 block":
        rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
        padded = F.pad(weight, (0, columns * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0]))
        blocks = padded.view(rows, block[0], columns, block[1])
        scales = blocks.abs().amax((1, 3)) / 448
        whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        whole = whole[: weight.shape[0], : weight.shape[1]]
        codes = (weight / whole.clamp(min=1e-9)).to(FP8)
        return Stored({"weight": codes, "weight_scale_inv": scales}, codes.float() * whole)
    if kind in ("fp8 channel", "fp8 tensor static", "int8"):
        largest = weight.abs().amax(1, keepdim=True) if kind != "fp8 tensor static" else weight.abs().max().view(1)
        scales = (largest / (127 if kind == "int8" else 448)).clamp(min=1e-9)
        codes = (weight / scales).round().to(torch.int8) if kind == "int8" else (weight / scales).to(FP8)
        tensors, input_scale = {"weight": codes, "weight_scale": scales}, None
        if "static" in kind:
            input_scale = tensors["input_scale"] = torch.rand(1, generator=generator) / 50 + 0.01
        return Stored(tensors, codes.float() * scales, input_scale)
    return _store_integers(kind, weight, generator)


def _store_integers(kind: str, weight: torch.Tensor, generator: torch.Generator) -> Stored:
    num_outputs, num_inputs = weight.shape
    bits = 8 if "8" in kind else 4
    group = num_inputs if "channel" in kind else 4 * GROUP if "wide" in kind else GROUP
    num_groups = -(-num_inputs // group)
    groups = torch.arange(num_inputs) // group
    if "order" in kind:
        groups = groups[torch.randperm(num_inputs, generator=generator)]
    has_zeros = kind.startswith("awq") or "asym" in kind or "gptq" in kind
    codes, scales, zeros = _rounded(weight, groups, num_groups, bits, has_zeros)
    expanded = (codes - zeros[:, groups]).float() * scales[:, groups]
    per_word = 32 // bits
    if kind.startswith("awq"):
        tensors = {"qweight": _pack_awq(codes.t()), "qzeros": _pack_awq(zeros.t()), "scales": scales.t().contiguous()}
    elif kind.startswith("gptq"):
        tensors = {
            "qweight": _pack(codes, per_word).t().contiguous(),
            "qzeros": _pack(zeros.t() - 1, per_word),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
    else:
        tensors = {
            "weight_packed": _pack(codes, per_word),
            "weight_scale": scales,
            "weight_shape": torch.tensor([num_outputs, num_inputs]),
        }
        if "asym" in kind:
            tensors["weight_zero_point"] = _pack(zeros.t(), per_word).t().contiguous()
        if "order" in kind:
            tensors["weight_g_idx"] = groups.int()
    return Stored(tensors, expanded)


def _rounded(
    weight: torch.Tensor, groups: torch.Tensor, num_groups: int, bits: int, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales (as float16 has them) and zeros [out, groups]."""
    largest = (1 << bits) - 1
    scales, zeros = (torch.zeros(len(weight), num_groups) for _ in range(2))
    for number in range(num_groups):
        part = weight[:, groups == number]
        if has_zeros:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, number] = ((high - low) / largest).half().float()
            zeros[:, number] = (-low / scales[:, number].clamp(min=1e-9)).round().clamp(1, largest)
        else:
            scales[:, number] = (part.abs().amax(1) / (largest // 2)).half().float()
            zeros[:, number] = 1 << (bits - 1)
    inverse = 1 / scales.clamp(min=1e-9)
    codes = (weight * inverse[:, groups]).round() + zeros[:, groups]
    return codes.clamp(0, largest).long(), scales, zeros.long()


def _pack(numbers: torch.Tensor, per_word: int) -> torch.Tensor:
    """[n, numbers] -> [n, words] int32, the first in the lowest bits."""
    padded = F.pad(numbers, (0, -numbers.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = sum(padded[..., place] << (32 // per_word * place) for place in range(per_word))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _pack_awq(numbers: torch.Tensor) -> torch.Tensor:
    eights = numbers.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return _pack(eights.flatten(1), 8)


def rounded_inputs(
    kind: str, x: torch.Tensor, input_scale: torch.Tensor | None, block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """What a product of this kind sees of x [..., in]."""
    if kind == "fp8 block":
        parts = x.split(block[1], -1)
        return torch.cat([_dynamic(part, 448) for part in parts], -1)
    if kind == "fp8 channel":
        return _dynamic(x, 448)
    if kind == "int8":
        return _dynamic(x, 127)
    if kind == "fp8 tensor static":
        return (x / input_scale).clamp(-448, 448).to(FP8).float() * input_scale
    return x


def _dynamic(x: torch.Tensor, largest: int) -> torch.Tensor:
    scales = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
    return (x / scales).round() * scales if largest == 127 else (x / scales).to(FP8).float() * scales


def save_quantized(folder: Path, model: Any, kind: str) -> Any:
    """Writes the folder; the model becomes what it means: expanded weights, and rounded inputs."""
    modules, tensors = dict(model.named_modules()), {}
    for name, tensor in model.state_dict().items():
        matrix = name.removesuffix(".weight")
        if matrix == name or not is_quantized(kind, matrix):
            tensors[name] = tensor.clone()
            continue
        stored = store(kind, tensor, seed=len(tensors))
        tensors |= {f"{matrix}.{suffix}": part.contiguous() for suffix, part in stored.tensors.items()}
        modules[matrix].weight.data.copy_(stored.expanded)
        modules[matrix].register_forward_pre_hook(
            lambda _, args, scale=stored.input_scale: (rounded_inputs(kind, args[0], scale),)
        )
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    config = model.config.to_dict() | {"quantization_config": config_of(kind), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    return model


def quantize_folder(folder: Path, block: tuple[int, int], kept: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Rewrites a saved model with its linears in FP8 by blocks, but for those of `kept`; returns the weights that these
    mean, by name."""
    tensors, expanded, quantization = {}, {}, config_of("fp8 block") | {"weight_block_size": [*block]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        if matrix == name or matrix in kept or not is_quantized("fp8 block", matrix):
            tensors[name] = tensor.clone()
            continue
        stored = store("fp8 block", tensor.float(), block=block)
        tensors |= {f"{matrix}.{suffix}": part.contiguous() for suffix, part in stored.tensors.items()}
        expanded[name] = stored.expanded
    quantization |= {"modules_to_not_convert": [*kept]} if kept else {}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return expanded
