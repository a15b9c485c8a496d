"""Published dense decoders."""

from __future__ import annotations

from ringcore.kernels.persistent.persistent_tiles import DecoderShape

__all__ = ["SHAPES"]

SHAPES = {
    "Qwen3-0.6B": DecoderShape(1024, 3072, 16, 8, 128),
    "Llama-3.2-1B": DecoderShape(2048, 8192, 32, 8, 64),
    "Llama-3.2-3B": DecoderShape(3072, 8192, 24, 8, 128),
    "Qwen3-4B": DecoderShape(2560, 9728, 32, 8, 128),
    "Qwen3-8B": DecoderShape(4096, 12288, 32, 8, 128),
    "Llama-3.1-8B": DecoderShape(4096, 14336, 32, 8, 128),
    "Qwen3-14B": DecoderShape(5120, 17408, 40, 8, 128),
    "Qwen2.5-3B": DecoderShape(2048, 11008, 16, 2, 128),
    "Qwen2.5-7B": DecoderShape(3584, 18944, 28, 4, 128),
    "GLM-4-9B": DecoderShape(4096, 13696, 32, 2, 128),
    "Llama-2-7B": DecoderShape(4096, 11008, 32, 32, 128),
}
