"""The connections of a worker to the others: to those of its stage, and to those of its number in other stages."""

from __future__ import annotations

from ringcore.config import RankLayout
from ringcore.distributed.parallel import SingleRank, Stage, TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.distributed.rendezvous import Rendezvous
from ringcore.errors import InvalidRequestError
from ringcore.worker.platforms.platform import Platform

__all__ = ["connect", "stage_of"]


def stage_of(layout: RankLayout, rank: int) -> Stage:
    return Stage(layout.stage_of(rank), layout.num_stages)


def connect(
    platform: Platform, layout: RankLayout, rank: int, rendezvous: str | None
) -> tuple[TensorParallel, StageLink | None]:
    """rendezvous: file or address where all ranks meet; None for one rank. Raises RuntimeError where one is missing,
    OSError where rank 0 cannot listen."""
    if layout.world_size == 1:
        return SingleRank(), None
    if rendezvous is None:
        raise InvalidRequestError(
            f"rendezvous=None: {layout.world_size} ranks need a file or an address to find each other",
            field="rendezvous",
            value=None,
        )
    size, number, stage = layout.ranks_per_stage, layout.tensor_rank_of(rank), stage_of(layout, rank)
    place = Rendezvous(rendezvous, rank, layout.world_size)
    tp: TensorParallel = SingleRank()
    if size > 1:
        tp = platform.connect(number, size, place, f"stage {stage.index}", layout.is_stage_on_one_host(stage.index))
    return tp, platform.link(stage, place, f"ranks {number}") if stage.size > 1 else None
