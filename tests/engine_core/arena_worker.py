"""Fake workers whose weights and pages lie in arenas of a fake device: what they compute is what is in there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))

from fake_engine import FakeWorker, next_token
from fake_virtual_memory import FakeVirtualMemory
from rank_memory import ArenaPlatform

from ringcore.errors import InvalidRequestError
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.worker import rpc
from ringcore.worker.memory.host_link import LocalLink
from ringcore.worker.memory.host_store import HostBudget, MemoryStore
from ringcore.worker.sleep import RankMemory

__all__ = ["ArenaWorker", "create_worker", "entry"]

PAGE = FakeVirtualMemory.granularity
NUM_WEIGHTS = 5000  # all are the same number
HOST_BYTES = 1 << 40


def entry(token: int, weights: int) -> int:
    """What a page has of a token, computed with these weights. Never 0."""
    return 1 + token + weights * 1000


class ArenaWorker(FakeWorker):
    """Every number that it reads has to be the right one, and to have memory behind it."""

    def __init__(self, config, rank: int) -> None:
        super().__init__(config, rank)
        self.device = FakeVirtualMemory(40 * PAGE)
        self.platform = ArenaPlatform(self.device)
        self.host_bytes = HOST_BYTES
        self._tables: dict[int, list[int]] = {}

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        self.parameters = self.platform.allocate(4 * NUM_WEIGHTS, "weights").view(torch.int32).fill_(0)
        return super().load_model()

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        num_slots = kv_cache_config.num_blocks * self.config.cache.block_size
        self.slots = self.platform.allocate(4 * num_slots, "kv_cache").view(torch.int32)
        link, budget = LocalLink(), HostBudget(lambda: self.host_bytes, 1)
        self.store = MemoryStore(self.platform.arenas["weights"].used_bytes, link, budget)
        self.rank_memory = RankMemory(self.platform, self.store)
        self.addresses = self.parameters.data_ptr(), self.slots.data_ptr()
        self.mapped_bytes = {tag: arena.mapped_bytes for tag, arena in self.platform.arenas.items()}
        self.total_bytes = self.device.free_bytes + sum(self.mapped_bytes.values())

    # The step.

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        weights = self.read_weights()
        self.weights = weights
        for new in scheduler_output.new_requests:
            self._tables[new.row] = new.block_ids[0].tolist()
        for blocks in scheduler_output.new_blocks:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self._tables[row].append(block_id)
        self.device.check_access(self.slots)
        before = {new.row: new.num_computed_tokens for new in scheduler_output.new_requests}
        output = super().execute_model(scheduler_output)
        for row in self._rows:
            self._compute(row, before.get(row), weights)
        return output

    def _compute(self, row: int, first: int | None, weights: int) -> None:
        """Writes what the step computed and reads all of the sequence. first: where a new request began."""
        tokens, end = self._tokens[row], self._num_computed[row]
        done = self._written.get(row, 0) if first is None else first
        for position in range(done, end):
            self.slots[self._slot(row, position)] = entry(tokens[position], weights)
        self._written[row] = end
        found = self.slots[[self._slot(row, position) for position in range(end)]].tolist()
        assert found == [entry(token, weights) for token in tokens[:end]], "a page is not what was computed"

    def _slot(self, row: int, position: int) -> int:
        size = self.config.cache.block_size
        return self._tables[row][position // size] * size + position % size

    @property
    def _written(self) -> dict[int, int]:
        return self.__dict__.setdefault("_written_by_row", {})

    def read_weights(self) -> int:
        self.device.check_access(self.parameters)
        (number,) = np.unique(self.parameters.numpy()).tolist()
        return number

    # Memory and new weights.

    @rpc(scope="engine")
    def prepare_memory(self, target: dict[str, str]) -> dict[str, float]:
        return self.rank_memory.prepare(target)

    @rpc(scope="engine")
    def commit_memory(self) -> dict[str, float]:
        report = self.rank_memory.commit()
        self.memory = self.rank_memory.states
        return report

    @rpc(scope="engine")
    def roll_back_memory(self) -> None:
        self.rank_memory.roll_back()

    @rpc(read_only=True)
    def memory_states(self) -> dict[str, str]:
        return self.rank_memory.states

    @rpc(scope="engine")
    def start_weight_update(self) -> None:
        self.device.check_access(self.parameters)
        self._num_new = 0

    @rpc(scope="engine")
    def update_weights(self, source: dict) -> dict[str, float]:
        """{"number": n, "count": so many of them}, or files, which bring all; a number below 0 is refused half way."""
        number, count = source.get("number"), source.get("count", NUM_WEIGHTS)
        if source["kind"] == "files":
            number = int(Path(source["path"]).name)
        end = min(self._num_new + count, NUM_WEIGHTS)
        self.parameters[self._num_new : end] = number
        self._num_new = end
        if number < 0:
            raise InvalidRequestError(f"no tensor {number}", field="tensors", value=number)
        return {"num_tensors": float(count)}

    @rpc(scope="engine")
    def finish_weight_update(self, require_all: bool) -> dict[str, float]:
        if require_all and self._num_new < NUM_WEIGHTS:
            raise InvalidRequestError("a tensor is missing", field="tensors", value="x")
        return {}

    @rpc(scope="engine")
    def shutdown(self) -> None:
        self.store.close()
        self.platform.close()
        self.device.check_nothing_left()

    def check(self) -> None:
        """No address changes, and what is mapped is what is accounted."""
        assert (self.parameters.data_ptr(), self.slots.data_ptr()) == self.addresses
        states = self.rank_memory.states
        for tag, arena in self.platform.arenas.items():
            assert arena.mapped_bytes == (self.mapped_bytes[tag] if states[tag] == "resident" else 0), tag
        mapped = sum(arena.mapped_bytes for arena in self.platform.arenas.values())
        assert sum(size for size, _ in self.device.mapped.values()) == mapped
        assert len(self.device.handles) - len(self.device.mapped) in (0, 1), (
            "memory that nobody can reach"
        )  # a tenant's


def next_with(tokens: list[int], weights: int) -> int:
    return next_token(tokens, weights)


def create_worker(config, rank: int, rendezvous: str | None) -> ArenaWorker:
    return ArenaWorker(config, rank)
