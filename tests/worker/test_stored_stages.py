"""Stages of a pipeline, each with a store of its own layers' KV: what is loaded is what was computed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from step_driver import admit, execute, make_config, make_step

from ringcore.config import EngineConfig
from ringcore.engine_core.kv_store import OpenedStore, open_store
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.protocol.codec import int_array
from ringcore.protocol.stored_kv import KVLoad, KVTransfers
from ringcore.worker.worker import Worker

PROMPT = [5, 9, 14, 3, 77, 8, 21, 30, 2]  # two blocks of 4 tokens, and one token
NAMES = [b"one", b"two"]


class Workers:
    """Calls workers in this thread, as an executor would in their processes."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        num_ranks = config.parallel.layout.world_size
        folder.mkdir()
        self.all = [Worker(config, rank, str(folder / "rendezvous")) for rank in range(num_ranks)]
        threads = [threading.Thread(target=worker.init_device, daemon=True) for worker in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for worker in self.all:
            worker.load_model()
        specs = [worker.get_kv_cache_spec() for worker in self.all]
        plan = plan_kv_cache(
            specs,
            [1 << 24] * num_ranks,
            max_model_len=128,
            fit_max_model_len=False,
            max_tokens_in_flight=64,
            num_blocks_override=40,
            num_stages=config.parallel.layout.num_stages,
        )
        for worker in self.all:
            worker.initialize_from_config(plan)
        self.ranks: list[KVCacheConfig] = [plan.of_layers(of_rank.keys()) for of_rank in specs]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.all]

    def step(self, transfers: KVTransfers | None = None, **step: Any) -> list[int]:
        """The tokens that the last stage samples."""
        scheduled = msgspec.structs.replace(make_step(**step), kv_transfers=transfers)
        *_, output = [execute(worker, scheduled) for worker in self.all]
        assert output is not None
        return output.token_ids.tolist()

    def pages(self, blocks: list[int]) -> list[torch.Tensor]:
        """Of each rank, uint8 [n, block_bytes]."""
        found = []
        for worker in self.all:
            pages = worker._runner.paged.block_pages()  # type: ignore[union-attr]
            found.append(torch.empty((len(blocks), pages.block_bytes), dtype=torch.uint8))
            pages.gather(torch.tensor(blocks), found[-1])
        return found

    def load(self, number: int, blocks: list[int]) -> list[list[bool]]:
        """Loads `NAMES` beside a step of another request."""
        transfers = KVTransfers([], [], int_array(), [KVLoad(number, NAMES, int_array(blocks))])
        self.step(transfers, scheduled={5: 1}, new=[admit(5, [7], [39])], number=20 + number)
        deadline = time.monotonic() + 30
        while None in (
            reports := [one.results[0] for one in self.collective_rpc("finished_kv_loads", ([number], 0.0))]
        ):
            assert time.monotonic() < deadline
        return reports

    def close(self) -> None:
        for worker in self.all:
            worker.shutdown()


def opened(workers: Workers, config: EngineConfig) -> OpenedStore:
    return open_store(config, workers, workers.ranks)  # type: ignore[arg-type]


@pytest.fixture
def config(tiny_llama: tuple[str, Any], tmp_path: Path) -> EngineConfig:
    (tmp_path / "kv").mkdir()
    return make_config(
        tiny_llama[0],
        device="cpu",
        pipeline_parallel_size=2,
        host_kv_cache_bytes=1 << 20,
        host_kv_cache_dir=str(tmp_path / "kv"),
    )


def test_two_stages(config: EngineConfig, tmp_path: Path) -> None:
    """Blocks go to memory and files of each stage, and come back to other blocks, also in a later engine."""
    workers = Workers(config, tmp_path / "first")
    opened(workers, config)
    of_stages = [rank.block_bytes for rank in workers.ranks]
    (expected,) = workers.step(scheduled={0: 9}, new=[admit(0, PROMPT, [1, 2, 3])])
    computed = workers.pages([1, 2])
    assert [page.shape[1] for page in computed] == of_stages
    workers.step(
        KVTransfers([], NAMES, int_array([1, 2]), []),
        scheduled={1: 9},
        new=[admit(1, [4] * 9, [1, 2, 4])],
        finished=[0],
    )
    assert not any(map(torch.equal, workers.pages([1, 2]), computed))  # they are another's now
    assert workers.load(0, [10, 11]) == [[True, True]] * 2
    assert all(map(torch.equal, workers.pages([10, 11]), computed))
    cached = admit(2, PROMPT, [10, 11, 12], computed=8)
    assert workers.step(scheduled={2: 1}, new=[cached]) == [expected]
    workers.close()

    workers = Workers(config, tmp_path / "second")
    store = opened(workers, config).store
    assert store is not None
    assert all(name in store for name in NAMES)
    assert workers.load(0, [20, 21]) == [[True, True]] * 2
    assert all(map(torch.equal, workers.pages([20, 21]), computed))
    assert workers.step(scheduled={2: 1}, new=[admit(2, PROMPT, [20, 21, 22], computed=8)]) == [expected]
    levels = [report.levels for report in workers.collective_rpc("finished_kv_loads", ([0], 0.0))]
    assert [one.directory_loaded_bytes for one in levels] == [2 * size for size in of_stages]
    workers.close()
