"""What an attention layer computes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionSpec"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer computes on this rank. Its head sizes, and which tokens a token sees, are in its KVCacheSpec."""

    num_heads: int
    scale: float  # of the scores, above 0
    softcap: float | None = None  # above 0: each score becomes softcap * tanh(score / softcap)
    has_sinks: bool = False  # each query head has a sink: one more logit, with a weight and no value
    expanded_sizes: tuple[int, int] | None = None  # over latents: of a head's key and of its value
    shares_kv: bool = False  # keys and values are in their slots: the layer whose cache it reads has written them

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the softmax of the scaled scores."""
        return self.softcap is None and not self.has_sinks
