"""Reads the rotary embedding from the metadata and the tensors of a GGUF file."""

from __future__ import annotations

import math

import numpy as np

from ringcore.checkpoint.gguf_fields import shortest
from ringcore.checkpoint.gguf_header import GGUFHeader
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.model_spec import RopeSpec
from ringcore.errors import ModelLoadError

__all__ = ["read_gguf_rope"]

# The parameters of llama3 scaling in all published models.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192


def read_gguf_rope(header: GGUFHeader, meta: Metadata, name: str, head_dim: int) -> RopeSpec:
    """name: the architecture's; head_dim: how many numbers of a head are rotated. Raises `ModelLoadError` for a scaling
    that is not known."""
    theta = shortest(meta.number(f"{name}.rope.freq_base", 10_000.0))
    if theta <= 1:
        raise meta.error(f"{name}.rope.freq_base", f"is {theta}, it must be above 1: frequencies fall")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(header, theta, head_dim)
    prefix = f"{name}.rope.scaling."
    kind = meta.text(prefix + "type", "none")
    if kind == "none":
        old_scale = shortest(meta.number(f"{name}.rope.scale_linear", 1.0))  # before rope.scaling.*
        return RopeSpec(theta, "linear", old_scale) if old_scale != 1.0 else RopeSpec(theta)
    factor = shortest(meta.number(prefix + "factor"))
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    if kind != "yarn" or prefix + "yarn_log_multiplier" in meta:
        raise meta.error(prefix + "type", f"is {kind!r}; known: none, linear, yarn without yarn_log_multiplier")
    scale = shortest(meta.number(prefix + "attn_factor", 1.0))
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=meta.integer(prefix + "original_context_length"),
        beta_fast=shortest(meta.number(prefix + "yarn_beta_fast", 32.0)),
        beta_slow=shortest(meta.number(prefix + "yarn_beta_slow", 1.0)),
        # GGML multiplies the paper's scale by its factor; config.json gives the product.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
    )


def _llama3_divisors(theta: float, factor: float, head_dim: int) -> np.ndarray:
    """What llama3 scaling, with the published parameters, divides each frequency by: [head_dim / 2] float64."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_POSITIONS / wavelength
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama3_rope(header: GGUFHeader, theta: float, head_dim: int) -> RopeSpec:
    """Llama 3.1's RoPE scaling: a GGUF file holds only the resulting frequency divisors.

    All published models share the parameters except the factor, which is the largest divisor; these are used if they
    reproduce the file's divisors, else the file is refused.
    """
    info = header.tensors["rope_freqs.weight"]
    if info.shape == (head_dim // 2,) and info.ggml_type == 0:
        with open_model_file(header.path) as file:
            divisors = np.fromfile(file, "<f4", head_dim // 2, offset=info.offset)
        factor = float(divisors.max(initial=0)) if len(divisors) == head_dim // 2 else 0.0
        if factor >= 1 and np.allclose(divisors, _llama3_divisors(theta, factor, head_dim), rtol=1e-4, atol=0):
            return RopeSpec(theta, "llama3", factor, _LLAMA3_POSITIONS, _LLAMA3_LOW, _LLAMA3_HIGH)
    raise ModelLoadError(
        f"{header.path}: tensor 'rope_freqs.weight' holds no llama3 scaling with the published parameters "
        "(low_freq_factor 1, high_freq_factor 4, 8192 positions); load the model from safetensors",
        path=header.path,
        tensor="rope_freqs.weight",
    )
