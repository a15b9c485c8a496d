"""Tiles that a search on this device found (`kernel_autotune`), which go before what was measured elsewhere
(`skinny_measured`) and before the model of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ringcore.host.measurements import Measurements
from ringcore.kernels.linears.skinny_tiles import Config, DotConfig, FmaConfig, PackedFmaConfig, TmaConfig
from ringcore.kernels.linears.skinny_times import Numbers

__all__ = ["FoundTiles", "TileProblem", "as_plain", "of_plain"]

_WHAT = "tile"  # is what a record holds
_KINDS: Mapping[str, type[Config]] = {
    "fma": FmaConfig,
    "packed_fma": PackedFmaConfig,
    "dot": DotConfig,
    "tma": TmaConfig,
}


@dataclass(frozen=True, slots=True)
class TileProblem:
    """A product of some layers of a model, for a range of rows that share a configuration."""

    num_outputs: int  # a gated weight has twice as many rows
    num_inputs: int
    is_gated: bool
    epilogue: str  # "plain", "partial", "added", or the prologue "after_norm"
    kind: str  # of the kernels: "dense", "packed", "rounded" or "experts"
    storage: str  # of the weight, in words
    numbers: Numbers
    max_rows: int  # of the range: see `skinny_configs.last_of_range`; of experts, tokens
    num_experts: int = 0  # of experts, as the next
    k: int = 0

    @property
    def shown(self) -> str:
        gated = " gated" if self.is_gated else ""
        name = f"{self.num_outputs:,}{gated} x {self.num_inputs:,} {self.storage} {self.epilogue.replace('_', ' ')}"
        return f"{name}, {'1 row' if self.max_rows == 1 else f'up to {self.max_rows} rows'}"


class FoundTiles:
    """The one owner of what was found for the products of a model on one device.

    Until it is frozen, what another start has recorded is read when a product first asks for it. `freeze` makes it the
    same on all ranks: what one of them has read the others may have missed.
    """

    def __init__(self, measurements: Measurements, device: Mapping[str, str]) -> None:
        """device: what else a record depends on: the device, and the versions of what compiles."""
        self._measurements, self._device = measurements, dict(device)
        self._known: dict[TileProblem, Config | None] = {}  # None: cuBLAS
        self._missing: set[TileProblem] = set()
        self._tried: dict[TileProblem, Config | None] = {}
        self.is_frozen = False

    def choose(self, problem: TileProblem, otherwise: Callable[[], Config | None]) -> Config | None:
        """otherwise: the choice without a search."""
        if problem in self._tried:
            return self._tried[problem]
        if problem in self._known:
            return self._known[problem]
        if not self.is_frozen and problem not in self._missing:
            recorded = self._measurements.read(self._key(problem), _WHAT, _record)
            if recorded is not None:
                self._known[problem] = of_plain(recorded["config"])
                return self._known[problem]
            self._missing.add(problem)
        return otherwise()

    @contextmanager
    def trying(self, problem: TileProblem, config: Config | None) -> Iterator[None]:
        """Inside, `problem` is computed by `config`."""
        self._tried = {problem: config}
        try:
            yield
        finally:
            self._tried = {}

    def _key(self, problem: TileProblem) -> dict[str, str]:
        return self._device | {name: str(value) for name, value in asdict(problem).items()}

    @property
    def can_record(self) -> bool:
        return self._measurements.can_record()

    def search(self, problem: TileProblem, measure: Callable[[], Mapping[str, Any]]) -> bool:
        """Records what `measure` returns, in which "config" is as of `as_plain`, or takes what another process has
        recorded meanwhile. Whether it is recorded now."""
        found = self._measurements.recorded(self._key(problem), _WHAT, _record, dict, measure)
        if found is None:
            return False
        self._known[problem] = of_plain(found["config"])
        self._missing.discard(problem)
        return True

    @property
    def found(self) -> dict[TileProblem, Config | None]:
        return dict(self._known)

    def freeze(self, found: Mapping[TileProblem, Config | None]) -> None:
        """From now on it has these, and no others."""
        self._known, self.is_frozen = dict(found), True


def _record(content: Any) -> Mapping[str, Any]:
    of_plain(content["config"])
    return dict(content)


def as_plain(config: Config | None) -> dict[str, Any] | None:
    """For JSON."""
    if config is None:
        return None
    (kind,) = (name for name, one in _KINDS.items() if isinstance(config, one))
    return {"kind": kind, **asdict(config)}


def of_plain(content: Any) -> Config | None:
    """Raises ValueError, TypeError or KeyError for what `as_plain` does not give."""
    if content is None:
        return None
    numbers = {name: value for name, value in dict(content).items() if name != "kind"}
    if not all(type(value) in (int, bool) and value >= 0 for value in numbers.values()):
        raise ValueError(content)
    return _KINDS[content["kind"]](**numbers)
