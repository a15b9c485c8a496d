"""Where the ranks of an engine run, and which of them returns a step's output."""

from __future__ import annotations

from dataclasses import dataclass

from ringcore.errors import ConfigError

__all__ = ["LOCALHOST", "RankLayout"]

LOCALHOST = "localhost"  # the host of the engine process


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """hosts: the host of each rank, by rank. output_rank: the rank that replies to a step with its output; the others
    reply only with an error."""

    hosts: tuple[str, ...]
    output_rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.output_rank < len(self.hosts), self

    @classmethod
    def on_one_host(cls, world_size: int) -> RankLayout:
        """Every rank on the engine's own host; rank 0 returns the output."""
        return cls(hosts=(LOCALHOST,) * world_size)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

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
        if set(self.hosts) != {LOCALHOST}:
            raise ConfigError(
                f"executor={executor!r}: it starts workers on its own host alone, and the ranks are on "
                f"{', '.join(sorted(set(self.hosts)))}; give an executor that reaches them",
                option="executor",
                value=executor,
            )
