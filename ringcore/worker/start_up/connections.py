"""The connections of a worker to the others: to those of its stage, and to those of its number in other stages."""

from __future__ import annotations

from ringcore.config import RankLayout
from ringcore.distributed.parallel import SingleRank, Stage, TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.errors import InvalidRequestError
from ringcore.worker.platforms.platform import Platform

__all__ = ["connect", "stage_of"]


def stage_of(layout: RankLayout, rank: int) -> Stage:
    return Stage(layout.stage_of(rank), layout.num_stages)


def connect(
    platform: Platform, layout: RankLayout, rank: int, rendezvous: str | None
) -> tuple[TensorParallel, StageLink | None]:
    """rendezvous: file or address where all ranks meet; None for one rank. Raises RuntimeError where one is missing."""
    if layout.world_size == 1:
        return SingleRank(), None
    if rendezvous is None:
        raise InvalidRequestError(
            f"rendezvous=None: {layout.world_size} ranks need a file or an address to find each other",
            field="rendezvous",
            value=None,
        )
    size, number, stage = layout.ranks_per_stage, layout.tensor_rank_of(rank), stage_of(layout, rank)
    tp = platform.connect(number, size, rendezvous, f"stage {stage.index}") if size > 1 else SingleRank()
    return tp, platform.link(stage, rendezvous, f"ranks {number}") if stage.size > 1 else None
