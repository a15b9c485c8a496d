"""Where a head's graphs find their inputs, and where drafts go on: the arithmetic of their places, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringcore.worker.rows.block_table import BlockTable

__all__ = ["HeadInputs", "last_gained", "places_at"]


class HeadInputs(NamedTuple):
    """Of so many places, each a token of a sequence of its own; at fixed addresses. A run leaves in them the inputs of
    the next one, which drafts after its drafts."""

    token_ids: torch.Tensor  # [most] int64
    features: torch.Tensor  # [most, hidden_size] float32
    places: torch.Tensor  # [3, most] int32: positions, slots and lengths; zeros are padding
    limits: torch.Tensor  # [most] int32: drafts go on at positions below
    tables: torch.Tensor  # [most, width] int32

    @classmethod
    def allocate(cls, most: int, hidden_size: int, table: BlockTable, device: torch.device) -> HeadInputs:
        return cls(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            features=torch.zeros(most, hidden_size, device=device),
            places=torch.zeros(3, most, dtype=torch.int32, device=device),
            limits=torch.zeros(most, dtype=torch.int32, device=device),
            tables=torch.zeros(most, table.block_ids.shape[1], dtype=torch.int32, device=device),
        )

    def of(self, size: int) -> HeadInputs:
        """Views of the first ones."""
        token_ids, features, places, limits, tables = self
        return HeadInputs(token_ids[:size], features[:size], places[:, :size], limits[:size], tables[:size])


def places_at(
    positions: torch.Tensor, is_going: torch.Tensor, limits: torch.Tensor, tables: torch.Tensor, block_size: int
) -> torch.Tensor:
    """[3, n] int32: the positions [n] int32, slots and lengths of sequences that are going on [n] bool, and below their
    limits [n]; what is not is padding: an empty sequence that writes to the null block."""
    is_going = is_going & (positions < limits)
    positions = torch.where(is_going, positions, 0)
    blocks = tables.gather(1, (positions // block_size)[:, None].long())[:, 0]
    slots = torch.where(is_going, blocks * block_size + positions % block_size, 0)
    return torch.stack((positions, slots, positions + is_going))


def last_gained(gained: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [n] with counts[i] places from firsts[i] on, of which the first ones are gained [num_places] int32: how
    many are, and the place of the last, or the first place where none is. counts 0 is padding, of which none is."""
    up_to = gained.cumsum(0)
    lasts = (firsts + counts - 1).clamp(min=0)
    num_gained = torch.where(counts > 0, up_to[lasts] - up_to[firsts] + gained[firsts], 0)
    return num_gained, firsts + (num_gained - 1).clamp(min=0)
