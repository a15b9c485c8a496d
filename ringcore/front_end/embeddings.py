"""Embeddings: the request that asks for a pooled prompt, and the vector that comes of it."""

from __future__ import annotations

import numpy as np

from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import Pooling, SamplingParams

__all__ = ["embedding_of", "pooling_params"]


def pooling_params(pooling: Pooling) -> SamplingParams:
    """Of a request that ends with its prompt; the one token that it samples has no use."""
    return SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind="final", pooling=pooling)


def embedding_of(output: RequestOutput, normalize: bool) -> np.ndarray:
    """[hidden_size] float32 of a request that has ended; normalize: of length 1, unless all of it is 0."""
    assert output.pooled is not None, f"request {output.request_id!r} asked for no pooled prompt, or has failed"
    if not normalize:
        return output.pooled
    length = float(np.linalg.norm(output.pooled))
    return output.pooled / np.float32(length) if length else output.pooled
