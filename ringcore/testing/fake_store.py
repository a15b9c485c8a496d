"""A fake worker's store of KV beyond the device: names without contents. It checks what the engine asks of it."""

from __future__ import annotations

from ringcore.protocol.stored_kv import KVTransfers

__all__ = ["FakeStore"]


class FakeStore:
    """Loads take no time, and none fails."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self._loads: dict[int, list[bool]] = {}

    def transfer(self, transfers: KVTransfers) -> None:
        """Raises AssertionError for what no store can do."""
        self._names.difference_update(transfers.drops)
        assert self._names.isdisjoint(transfers.save_names), "a stored block is saved again"
        assert len(transfers.save_names) == len(transfers.save_block_ids), "a block for each name"
        self._names.update(transfers.save_names)
        for load in transfers.loads:
            assert self._names.issuperset(load.names), "a block is loaded that is not stored"
            self._loads[load.number] = [True] * len(load.names)

    def results(self, numbers: list[int]) -> list[list[bool] | None]:
        return [self._loads.get(number) for number in numbers]
