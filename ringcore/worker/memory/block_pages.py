"""The pages of a rank's blocks as bytes: a block's pages in all layers, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["BlockPages"]


class BlockPages:
    """views: [num_blocks, ...] each, which together hold the bytes of every block, and share no bytes.

    block_bytes: of one block. layout: equal in every process whose blocks have the same bytes for the same contents.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.device = views[0].device
        self.layout = "; ".join(f"{tuple(view.shape[1:])} {view.dtype}" for view in views)
        self._views = _as_one(views) or list(views)
        self._sizes = [math.prod(view.shape[1:]) * view.itemsize for view in self._views]
        self.block_bytes = sum(self._sizes)

    def gather(self, block_ids: torch.Tensor, out: torch.Tensor) -> None:
        """block_ids: [n] int64, on the device; out: uint8 [n, block_bytes], there too."""
        at = 0
        for view, size in zip(self._views, self._sizes, strict=True):
            block = view.index_select(0, block_ids).view(len(block_ids), -1).view(torch.uint8)
            out[:, at : at + size].copy_(block)
            at += size

    def scatter(self, block_ids: torch.Tensor, source: torch.Tensor) -> None:
        """What `gather` made, into blocks. source: uint8 [n, block_bytes]."""
        at = 0
        for view, size in zip(self._views, self._sizes, strict=True):
            block = source[:, at : at + size].contiguous().view(view.dtype)
            view.index_copy_(0, block_ids, block.view(len(block_ids), *view.shape[1:]))
            at += size


def _as_one(views: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Where the views are layers of one allocation at equal distances, with contiguous blocks of equal size, all of
    them as one view [num_blocks, num_views, words] of 64 bits: a copy is then one kernel, not one a layer."""
    first = views[0]
    page, starts = first[0].nbytes, [view.data_ptr() for view in views]
    distance = starts[1] - starts[0] if len(views) > 1 else page
    are_alike = all(view.is_contiguous() and view[0].nbytes == page for view in views)
    is_one = len({view.untyped_storage().data_ptr() for view in views}) == 1
    if not (are_alike and is_one and starts == [starts[0] + i * distance for i in range(len(views))]):
        return None
    offset = starts[0] - first.untyped_storage().data_ptr()
    if distance < 0 or any(number % 8 for number in (page, distance, offset)):
        return None
    size, stride = (len(first), len(views), page // 8), (page // 8, distance // 8, 1)
    whole = torch.empty(0, dtype=torch.int64, device=first.device)
    return [whole.set_(first.untyped_storage(), offset // 8, size, stride)]
