"""A fake of speculative decoding: how many draft tokens the model would accept, without drafting any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringcore.errors import ConfigError
from ringcore.protocol.requests import EngineCoreRequest

__all__ = ["FakeSpeculator"]

_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SEED_STRIDE = np.int64(1 << 24)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class FakeSpeculator:
    """Drafts `num_drafts` tokens for each request in each step, of which the model accepts the first ones: each with
    probability `acceptance` if those before it were accepted.

    A pure function of a request's seed and the position, so that every run accepts the same. num_drafts=0: none.
    Raises `ConfigError`.
    """

    num_drafts: int = 0
    acceptance: float = 0.8

    def __post_init__(self) -> None:
        if self.num_drafts < 0:
            raise ConfigError(
                f"num_drafts={self.num_drafts}: give 0 or more", option="num_drafts", value=self.num_drafts
            )
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(
                f"acceptance={self.acceptance}: give a probability, 0 to 1", option="acceptance", value=self.acceptance
            )

    def max_gain(self, request: EngineCoreRequest) -> int:
        """The engine's `MaxGain`."""
        return 1 + self.num_drafts

    def num_accepted(self, seeds: np.ndarray, positions: np.ndarray, max_drafts: np.ndarray) -> np.ndarray:
        """[n] int64: the drafts accepted after positions[i] tokens, at most max_drafts[i]."""
        x = (positions + seeds * _SEED_STRIDE).view(np.uint64) * _GOLDEN
        x ^= x >> _SHIFT
        x *= _MIX
        uniform = ((x >> _SHIFT).astype(np.float64) + 0.5) / 2**32
        # The first j drafts are accepted with probability acceptance ** j: where `uniform` is below that.
        chances = self.acceptance ** np.arange(1, self.num_drafts + 1)
        accepted: np.ndarray = np.minimum((uniform[:, None] < chances).sum(axis=1), max_drafts)
        return accepted
