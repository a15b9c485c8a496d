"""Where the ranks of an engine run, which stage of the model each has, and which of them returns a step's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcore.errors import ConfigError

__all__ = ["LOCALHOST", "UNPLACED", "RankLayout"]

LOCALHOST = "localhost"  # the host of the engine process
UNPLACED = "unplaced"  # of ranks whose hosts the executor finds when it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """hosts: the host of each rank, by rank. output_rank: the rank that replies to a step with its output, of the last
    stage; the others reply only with an error. num_stages: pipeline stages, each of as many successive ranks:

    rank        0  1  2  3    four ranks in two stages
    stage       0  0  1  1    has a part of the layers
    tensor rank 0  1  0  1    has a part of each of them
    """

    hosts: tuple[str, ...]
    output_rank: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.output_rank < len(self.hosts), self
        assert len(self.hosts) % self.num_stages == 0, self
        assert self.stage_of(self.output_rank) == self.num_stages - 1, self

    @classmethod
    def on_hosts(cls, hosts: Sequence[str], num_stages: int = 1) -> RankLayout:
        """hosts: of each rank. The first rank of the last stage returns the output."""
        last_stage = len(hosts) - len(hosts) // num_stages
        return cls(hosts=tuple(hosts), output_rank=last_stage, num_stages=num_stages)

    @classmethod
    def on_one_host(cls, world_size: int, num_stages: int = 1) -> RankLayout:
        """As `on_hosts`, with every rank on the engine's own host."""
        return cls.on_hosts((LOCALHOST,) * world_size, num_stages)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def ranks_per_stage(self) -> int:
        return len(self.hosts) // self.num_stages

    @property
    def has_far_ranks(self) -> bool:
        """Whether some are on other hosts than the engine process."""
        return set(self.hosts) != {LOCALHOST}

    def stage_of(self, rank: int) -> int:
        return rank // self.ranks_per_stage

    def tensor_rank_of(self, rank: int) -> int:
        """Its number among the ranks of its stage."""
        return rank % self.ranks_per_stage

    def is_stage_on_one_host(self, stage: int) -> bool:
        first = stage * self.ranks_per_stage
        return len(set(self.hosts[first : first + self.ranks_per_stage])) == 1

    def local_rank(self, rank: int) -> int:
        """The index of a rank among those of its host, which is also the index of its device there."""
        return self.hosts[:rank].count(self.hosts[rank])

    def num_local_ranks(self, rank: int) -> int:
        """How many ranks share this rank's host, its cores and its memory, itself included."""
        return self.num_ranks_on(self.hosts[rank])

    def num_ranks_on(self, host: str) -> int:
        return self.hosts.count(host)

    def check_one_host(self, executor: str) -> None:
        """For an executor that starts workers on its own host alone. Raises `ConfigError`."""
        if self.has_far_ranks:
            raise ConfigError(
                f"executor={executor!r}: it starts workers on its own host alone, and the ranks are on "
                f"{', '.join(sorted(set(self.hosts)))}; give an executor that reaches them",
                option="executor",
                value=executor,
            )
