"""From what workers report to an engine that can run: 2 layers of pages of 256 bytes, 512 bytes a block of 4 tokens."""

from __future__ import annotations

import pytest
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.engine_core.start_up import resolve_config, start_up
from ringcore.errors import CapacityError
from ringcore.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from ringcore.protocol.kernel_tuning import KernelTuning
from ringcore.protocol.model_report import ModelReport

BLOCK_BYTES = 512
FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=8)


class ReportingExecutor:
    """Workers that answer the calls of a start-up; `plan` is what they were given."""

    def __init__(self, available_bytes: list[int], layers) -> None:
        self.available_bytes, self.layers, self.plan = available_bytes, layers, None
        self.devices: list[str] = []
        self.num_graphs_left: int | None = None

    def collective_rpc(self, method, args=()):
        if method == "get_kv_cache_spec":
            return [self.layers for _ in self.available_bytes]
        if method == "determine_available_memory":
            return [{"total": 10**6, "available_kv_cache_bytes": available} for available in self.available_bytes]
        if method == "health":
            return [{"device": device} for device in self.devices]
        if method == "tune_kernels":
            return [{"num_shapes": 9, "num_known": 9, "num_searched": 4, "seconds": 1.5}, None]
        assert method == "initialize_from_config"
        (self.plan,) = args
        left = self.num_graphs_left
        model = {"impl": "transformers", "num_layers": 2, "fused": {"layers": 1}, "not_fused": ["the other"]}
        report = {"pages_s": 0.5, "graphs_left": float(left or 0), "model": model}
        return [None if left is None else report for _ in self.available_bytes]

    def pids(self):
        return {"worker 0": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder):
    def run(*num_blocks, layers=None, earlier=None, **options):
        """The executor, what is ready, and the cache, of ranks with room for so many blocks."""
        config = EngineConfig.from_options(
            model=folder, load_format="dummy", **({"max_num_batched_tokens": 4, "block_size": 4} | options)
        )
        executor = ReportingExecutor(
            [n * BLOCK_BYTES for n in num_blocks], layers or {"layers.0": FULL, "layers.1": FULL}
        )
        ready, kv_cache = start_up(config, executor, {"start": 0.5}, earlier)
        return executor, ready, kv_cache

    return run


def test_every_rank_gets_the_plan_of_the_smallest(start):
    executor, ready, kv_cache = start(32, 20, max_model_len=40)
    assert executor.plan.num_blocks == 20
    assert executor.plan == kv_cache.config
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (19, 4, 40)
    assert ready.max_concurrency == 19 / 10
    assert ready.kv_cache_token_bytes == BLOCK_BYTES // 4
    assert ready.token_capacity == 76
    assert [table["kv_cache"] for table in ready.memory_bytes] == [20 * BLOCK_BYTES] * 2
    assert ready.pids["worker 0"] == 7
    assert (ready.max_num_batched_tokens, ready.num_graphs_left) == (4, 0)
    assert list(ready.phase_seconds) == [
        "start",
        "get_kv_cache_spec",
        "determine_available_memory",
        "plan_kv_cache",
        "initialize_from_config",
    ]


def test_what_workers_say_of_their_device_and_their_graphs(folder):
    """The device's number of tokens is what the engine plans with; the workers are asked only where it is not known."""
    executor = ReportingExecutor([200 * BLOCK_BYTES] * 2, {"layers.0": WINDOW, "layers.1": FULL})
    config = EngineConfig.from_options(model=folder, load_format="dummy", block_size=4, max_model_len=40)
    executor.devices = ["cuda", "cuda"]
    resolved = resolve_config(config, executor)
    assert resolved == config.on_device("cuda")
    executor.devices = []
    assert resolve_config(resolved, executor) is resolved
    executor.num_graphs_left = 7
    ready, _ = start_up(resolved, executor, {})
    assert (ready.max_num_batched_tokens, ready.num_graphs_left) == (8192, 7)
    assert executor.plan.max_tokens_in_flight == 2 * 8192
    assert ready.model == ModelReport("transformers", 2, {"layers": 1}, ["the other"])
    assert ready.phase_seconds["initialize_from_config.pages"] == 0.5
    assert set(ready.phase_seconds) & {"initialize_from_config.graphs_left", "graphs_left"} == set()


def test_kernels_are_tuned_before_memory_is_measured(start):
    _, ready, _ = start(32, 20, max_model_len=40, kernel_autotune=True)
    assert list(ready.phase_seconds)[:4] == ["start", "get_kv_cache_spec", "tune_kernels", "determine_available_memory"]
    assert ready.kernel_tuning == KernelTuning(9, 9, 4, seconds=1.5)
    assert ready.kernel_tuning.in_words == "9 of 9 shapes known, 4 searched now in 1.5 s, 0 of them faster"
    assert start(32, max_model_len=40)[1].kernel_tuning is None


def test_a_model_with_windows(start):
    """A request of 40 tokens: 10 blocks of full attention, and 5 to hold a run of 15 tokens, 8 - 1 and 8 in flight."""
    executor, ready, _ = start(58, layers={"layers.0": WINDOW, "layers.1": FULL}, max_model_len=40)
    assert executor.plan.max_tokens_in_flight == 8
    assert executor.plan.num_blocks == 116  # one page each
    assert ready.max_concurrency == 115 / 15
    assert ready.token_capacity == 306  # 115 * 40 / 15, and two thirds


def test_capacity_is_exact_where_floats_are_not(start):
    """61 blocks, 7 a request of 28 tokens."""
    assert int(61 / 7 * 28) == 243
    assert start(62, max_model_len=28)[1].token_capacity == 244


def test_smallest_block_of_all_groups(start):
    wide = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
    assert start(32, layers={"layers.0": FULL, "layers.1": wide}, max_model_len=16)[1].block_size == 4


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(11, 40), (65, 256), (1000, 256)])
def test_auto_is_fitted_and_passed_on(start, num_blocks, max_model_len):
    executor, ready, kv_cache = start(num_blocks, max_model_len="auto")  # the model has 256 positions
    assert executor.plan.max_model_len == ready.max_model_len == kv_cache.config.max_model_len == max_model_len


def test_what_is_not_auto_is_not_fitted(start):
    with pytest.raises(CapacityError, match=r"one request of 256 tokens .* lower max_model_len to 40"):
        start(11, max_model_len=None)


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(11, 40), (1000, 40), (6, 20)])
def test_a_restart_gives_no_more_than_there_was(start, num_blocks, max_model_len):
    executor, ready, kv_cache = start(num_blocks, max_model_len="auto", earlier=40)
    assert executor.plan.max_model_len == ready.max_model_len == kv_cache.config.max_model_len == max_model_len
    assert ready.num_blocks == num_blocks - 1


def test_a_restart_groups_the_layers_as_the_start_did(start):
    """Though 8 tokens, as they were fitted, are all in the window."""
    layers = {"layers.0": WINDOW, "layers.1": FULL}
    executor, ready, _ = start(3, layers=layers, max_model_len="auto")
    assert ready.max_model_len == 8
    again, ready, _ = start(3, layers=layers, max_model_len="auto", earlier=8)
    assert (again.plan, ready.max_model_len) == (executor.plan, 8)
    assert len(again.plan.groups) == 2


def test_a_restart_of_a_given_length(start):
    assert start(20, max_model_len=40, earlier=40)[1].max_model_len == 40
