"""Matrices in the types of a GGUF file."""

from __future__ import annotations

import gguf
import numpy as np

__all__ = ["encoded"]

# The package only expands these, so their blocks are random bits with sane scales, which lie at these bytes in float16.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """[..., n] float32 -> [..., bytes of a row] uint8, or float32 and float16 as they are."""
    if kind in _SCALES:
        return _random_blocks(values, kind)
    return gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind])


def _random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Of about the deviation of `values`."""
    type_ = gguf.GGMLQuantizationType[kind]
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    *outer, num_inputs = values.shape
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (*outer, num_inputs // numbers, num_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (len(_SCALES[kind]), *blocks.shape[:-1]))

    def scaled(by: float) -> np.ndarray:
        for at, scale in zip(_SCALES[kind], scales, strict=True):
            blocks[..., at : at + 2] = (scale * by).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(*outer, -1)

    unit = gguf.quants.dequantize(scaled(1e-3).reshape(-1, num_inputs // numbers * num_bytes), type_).std()
    return scaled(float(1e-3 * values.std() / unit))
