"""What came of a search for the fastest tiles (`kernel_autotune`), as workers report it."""

from __future__ import annotations

import msgspec

__all__ = ["KernelTuning"]


class KernelTuning(msgspec.Struct, frozen=True):
    """A shape is a product of a model for a range of rows."""

    num_shapes: int  # of the model, on one rank
    num_known: int = 0  # whose tiles a search has found, now or before
    num_searched: int = 0  # now
    num_faster: int = 0  # of these, with other tiles than before
    seconds: float = 0.0
    reason: str = ""  # why not all are known

    @property
    def in_words(self) -> str:
        searched = f"{self.num_searched} searched now in {self.seconds:.1f} s, {self.num_faster} of them faster"
        return f"{self.num_known} of {self.num_shapes} shapes known, {searched}{self.reason and f'; {self.reason}'}"
