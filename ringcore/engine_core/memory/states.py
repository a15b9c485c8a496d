"""The states of weights and KV cache, as all ranks have confirmed them. This module calls no device and no worker.

    weights     resident ──sleep 1──▶ offloaded ──wake_up──▶ resident
                resident ──sleep 2──▶ discarded ──wake_up──▶ stale ──update of all weights──▶ resident
                resident ──start of an update──▶ stale ──its end──▶ resident
    kv_cache    resident ──sleep 1 or 2──▶ discarded ──wake_up──▶ resident

`is_stopped` is the sleep of level 0: everything stays resident, and no step starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcore.errors import SleepingError
from ringcore.protocol.messages import MemoryState

__all__ = ["KV_CACHE", "WEIGHTS", "MemoryStates"]

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_TAGS = (WEIGHTS, KV_CACHE)
_NOT_RESIDENT = ("offloaded", "discarded")


class MemoryStates:
    """The state of each tag. `sleep_target` and `wake_target` return the changes to make on all ranks, `confirm`
    records that all ranks have made them."""

    def __init__(self) -> None:
        self._states: dict[str, MemoryState] = dict.fromkeys(_TAGS, "resident")
        self.is_stopped = False
        self.is_updating = False  # a weight update has started and not ended

    def __getitem__(self, tag: str) -> MemoryState:
        return self._states[tag]

    def as_dict(self) -> dict[str, MemoryState]:
        return dict(self._states)

    @property
    def is_sleeping(self) -> bool:
        """Whether some tag is not resident, or a sleep of level 0 is in effect."""
        return self.is_stopped or any(state in _NOT_RESIDENT for state in self._states.values())

    @property
    def serves(self) -> bool:
        """Whether steps may be computed."""
        return not self.is_stopped and all(state == "resident" for state in self._states.values())

    def not_resident(self) -> dict[str, MemoryState]:
        """The tags without device memory."""
        return {tag: state for tag, state in self._states.items() if state in _NOT_RESIDENT}

    # -----------------------------------------------------------------------------------------------------------
    # Changes.

    def sleep_target(self, level: int) -> dict[str, MemoryState]:
        """The changes for a sleep of this level; it never makes a tag resident. Stale weights are not offloaded."""
        target: dict[str, MemoryState] = {}
        if level >= 1 and self._states[KV_CACHE] == "resident":
            target[KV_CACHE] = "discarded"
        match level, self._states[WEIGHTS]:
            case 1, "resident":
                target[WEIGHTS] = "offloaded"
            case (1, "stale") | (2, "resident" | "stale" | "offloaded"):
                target[WEIGHTS] = "discarded"
        return target

    def wake_target(self, tags: Sequence[str] | None) -> dict[str, MemoryState]:
        """The changes for a wake-up of these tags (None: of all); weights first."""
        return {
            tag: "resident" for tag in _TAGS if (tags is None or tag in tags) and self._states[tag] in _NOT_RESIDENT
        }

    def confirm(self, target: Mapping[str, MemoryState]) -> None:
        """Every rank has made the changes of `target`."""
        for tag, state in target.items():
            is_lost = tag == WEIGHTS and state == "resident" and self._states[tag] == "discarded"
            self._states[tag] = "stale" if is_lost else state
        if target.get(WEIGHTS) in _NOT_RESIDENT:
            self.is_updating = False

    def begin_update(self) -> None:
        self._states[WEIGHTS], self.is_updating = "stale", True

    def fail_update(self) -> None:
        """The weights stay stale: some may be new."""
        self.is_updating = False

    def end_update(self) -> None:
        self._states[WEIGHTS], self.is_updating = "resident", False

    def reset(self, weights: MemoryState) -> None:
        """New workers: everything has device memory; `weights` is "resident" or "stale"."""
        self._states.update({WEIGHTS: weights, KV_CACHE: "resident"})
        self.is_updating = False

    # -----------------------------------------------------------------------------------------------------------
    # Refusals.

    def check_takes_requests(self) -> None:
        """Raises `SleepingError` unless a request would be computed, at once or after a sleep of level 0."""
        if tags := self.not_resident():
            raise SleepingError(
                f"the engine sleeps: {_format_states(tags)}; call wake_up() first", tags=sorted(tags), remedy="wake_up"
            )
        if self._states[WEIGHTS] == "stale":
            state = "a weight update is in progress" if self.is_updating else "the weights are stale"
            remedy = "finish_weight_update" if self.is_updating else "reload_weights"
            raise SleepingError(
                f"{state}: call {remedy}{'()' if self.is_updating else '(path), or update_weights with all of them,'} "
                "first",
                tags=[WEIGHTS],
                remedy=remedy,
            )

    def check_takes_weights(self) -> None:
        """Raises `SleepingError` while the weights have no device memory."""
        if self._states[WEIGHTS] in _NOT_RESIDENT:
            raise SleepingError(
                f"the engine sleeps: {WEIGHTS} {self._states[WEIGHTS]}; call wake_up(['weights']) first",
                tags=[WEIGHTS],
                remedy="wake_up",
            )


def _format_states(states: Mapping[str, str]) -> str:
    return ", ".join(f"{tag} {state}" for tag, state in states.items())
