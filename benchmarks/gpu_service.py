"""The load on a service, on a GPU: a model of published shapes, and requests to fill it."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.service_load import ServiceLoad

__all__ = ["GpuService"]


class GpuService(ServiceLoad):
    """service_load on a GPU, of a model of published shapes; needs no model"""

    defaults: ClassVar[dict[str, Any]] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "shapes": "Qwen3-0.6B",
        "requests": 400,
        "saturating_requests": 1024,
        "concurrency": 256,
        "prompt_tokens": "64-512",
        "new_tokens": "32-256",
    }
