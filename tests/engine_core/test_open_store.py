"""The start of a store of KV beyond the device: how many blocks, and under which names, on ranks with unlike layers."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.engine_core import kv_store
from ringcore.engine_core.kv_store import open_store
from ringcore.errors import CapacityError
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec

PAGE = 256
FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
HALF = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")


class OpeningExecutor:
    """Ranks that answer `open_kv_store` with what each holds."""

    def __init__(self, held: list[list[bytes]]) -> None:
        self.held = held
        self.asked: tuple[Any, ...] = ()

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[list[bytes]]:
        assert method == "open_kv_store"
        self.asked = args
        return self.held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


def make_folder(path: Path) -> str:
    """Six layers of twelve heads over one head of keys and values."""
    folder = make_model_folder(path)
    config = path / "config.json"
    sizes = {"num_hidden_layers": 6, "hidden_size": 48, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    return folder


def ranks_of(stages: list[int], ranks_per_stage: int, spec: KVCacheSpec = FULL) -> list[KVCacheConfig]:
    """stages: the number of layers of each."""
    ends = [sum(stages[: index + 1]) for index in range(len(stages))]
    tables = [{f"layers.{i}": spec for i in range(end - count, end)} for count, end in zip(stages, ends, strict=True)]
    specs = [table for table in tables for _ in range(ranks_per_stage)]
    plan = plan_kv_cache(
        specs,
        [10**9] * len(specs),
        max_model_len=64,
        fit_max_model_len=False,
        max_tokens_in_flight=8,
        num_blocks_override=20,
        num_stages=len(stages),
    )
    return [plan.of_layers(of_rank.keys()) for of_rank in specs]


def config_of(folder: str, stages: int, ranks_per_stage: int, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(
        model=folder,
        load_format="dummy",
        tensor_parallel_size=ranks_per_stage,
        pipeline_parallel_size=stages,
        **options,
    )


def opened(folder: str, stages: list[int], ranks_per_stage: int = 1, spec: KVCacheSpec = FULL, **options: Any) -> Any:
    config = config_of(folder, len(stages), ranks_per_stage, **options)
    executor = OpeningExecutor([[]] * len(stages) * ranks_per_stage)
    found = open_store(config, executor, ranks_of(stages, ranks_per_stage, spec))  # type: ignore[arg-type]
    return executor, found


def test_a_rank_has_room_for_its_own_layers(folder: str) -> None:
    """Four layers in two stages: a block has two pages on each rank, not four."""
    executor, found = opened(folder, [2, 2], host_kv_cache_bytes=12 * PAGE)
    assert executor.asked[1] == 6
    found.store.save([bytes([i]) for i in range(6)], range(6))
    assert len(found.store) == 6
    found.store.take_transfers()
    assert found.store.saved_bytes == 6 * 4 * PAGE  # of all ranks


def test_the_rank_with_the_largest_blocks_sets_their_number(folder: str) -> None:
    executor, found = opened(folder, [3, 1], 2, host_kv_cache_bytes=12 * PAGE)
    assert executor.asked[1] == 4
    found.store.save([b"one"], [1])
    found.store.take_transfers()
    assert found.store.saved_bytes == 2 * (3 + 1) * PAGE
    with pytest.raises(CapacityError, match=r"host_kv_cache_bytes=767: one block .* 768 bytes on a rank; give more"):
        opened(folder, [1, 3], 2, host_kv_cache_bytes=3 * PAGE - 1)


def test_only_what_every_rank_holds_is_stored(folder: str) -> None:
    executor = OpeningExecutor([[b"old", b"both", b"new"], [b"new", b"other", b"both"]])
    config = config_of(folder, 2, 1, host_kv_cache_bytes=10 * PAGE)
    store = open_store(config, executor, ranks_of([1, 1], 1)).store  # type: ignore[arg-type]
    assert store is not None
    assert [name in store for name in (b"old", b"both", b"new", b"other")] == [False, True, True, False]


def test_no_option_no_store(folder: str) -> None:
    executor, found = opened(folder, [2])
    assert (found.hasher, found.store, executor.asked) == (None, None, ())


def test_names_of_one_layout_are_not_another_s(
    folder: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head that every rank has, so that the specs tell nothing: six ranks of six layers in any stages, and splits
    of the layers, each have files of their own; so has each dtype, model, implementation and version."""
    files = {"host_kv_cache_bytes": 100 * PAGE, "host_kv_cache_dir": str(tmp_path_factory.mktemp("files"))}
    other_folder = make_folder(tmp_path_factory.mktemp("other"))
    names = {
        name: opened(*layout, **files | options)[0].asked[0]
        for name, (layout, options) in {
            "one stage": ((folder, [6], 6), {}),
            "two": ((folder, [3, 3], 3), {}),
            "two, split elsewhere": ((folder, [2, 4], 3), {}),
            "three": ((folder, [2, 2, 2], 2), {}),
            "three, split elsewhere": ((folder, [2, 1, 3], 2), {}),
            "six": ((folder, [1] * 6, 1), {}),
            "fewer ranks": ((folder, [3, 3], 2), {}),
            "half": ((folder, [3, 3], 3, HALF), {}),
            "another seed of dummy weights": ((folder, [3, 3], 3), {"seed": 1}),
            "another implementation": ((folder, [3, 3], 3), {"model_impl": "native"}),
        }.items()
    }
    assert opened(folder, [3, 3], 3, **files)[0].asked[0] == names["two"]  # as a later engine's
    same_model = opened(other_folder, [3, 3], 3, **files)[0].asked[0]
    assert same_model == names["two"]  # dummy weights of the same configuration: the folder's name is not in it
    monkeypatch.setattr(kv_store, "__version__", "0.0.0")
    names["another version"] = opened(folder, [3, 3], 3, **files)[0].asked[0]
    assert all(len(name) == 64 for name in names.values())
    equal = [pair for pair in combinations(names, 2) if names[pair[0]] == names[pair[1]]]
    assert not equal
