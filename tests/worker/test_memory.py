from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from step_driver import make_config

from ringcore.distributed.parallel import SingleRank, Stage, TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.distributed.rendezvous import Rendezvous
from ringcore.errors import CapacityError
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from ringcore.worker.memory.device_memory import MemoryTag
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.platform import Platform, ProcessMemory
from ringcore.worker.start_up.memory_budget import StepPeaks, activation_bytes, format_table, memory_table
from ringcore.worker.worker import Worker

MIB = 2**20


class FakePlatform(Platform):
    device = torch.device("cpu")
    attention_backends: ClassVar[Sequence[str]] = ()
    default_memory_share: ClassVar[float] = 0.5
    attention_gathers: ClassVar[bool] = True

    @classmethod
    def is_present(cls) -> bool:
        return True

    @classmethod
    def open(cls, rank: int, device_memory: str, enable_sleep_mode: bool) -> FakePlatform:
        return cls()

    def connect(self, rank: int, size: int, rendezvous: Rendezvous, name: str, one_host: bool) -> TensorParallel:
        return SingleRank()

    def link(self, stage: Stage, rendezvous: Rendezvous, name: str) -> StageLink:
        raise AssertionError

    def shared_memory_bytes(self, num_ranks: int) -> int:
        return self.free_memory_bytes() // num_ranks

    def memory_budget_bytes(self, asked_bytes: int) -> int:
        return asked_bytes

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        return "float32"

    def total_memory_bytes(self) -> int:
        return 1000 * MIB

    def free_memory_bytes(self) -> int:
        return 800 * MIB

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass


class MeasuringPlatform(FakePlatform):
    """A GPU's figures: of 800 MiB that are free it may have 700; the driver has 30 MiB in this process."""

    measures_steps: ClassVar[bool] = True
    attention_gathers: ClassVar[bool] = False
    attention_backends: ClassVar[Sequence[str]] = ("torch_sdpa",)

    def __init__(self, peaks: Sequence[int] = ()) -> None:
        self.peaks = list(peaks)

    def memory_budget_bytes(self, asked_bytes: int) -> int:
        return 700 * MIB

    def process_memory(self) -> ProcessMemory:
        return ProcessMemory(130 * MIB, 40 * MIB, 60 * MIB)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self.peaks.pop(0)


SPECS = {
    f"layers.{i}.attention": FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    for i in range(3)
}


def table(model: str, **options: Any) -> dict[str, int]:
    config = make_config(model, max_num_seqs=100_000, **options)
    return memory_table(config, FakePlatform(), SPECS, "float32", weights_bytes=7)


def test_activations_by_hand(tiny_llama: tuple[str, Any]) -> None:
    """64 tokens: 4 * 64 hidden and the larger of 3 * 96 and (2 * 4 + 4 * 2) * 16; mask 64 x 128; the larger of 6 times
    the rows of 97 logits that sample, and 3 times the 64 of a prompt."""
    for max_num_seqs, num_logits in ((6, 3 * 64), (40, 6 * 40)):
        config = make_config(tiny_llama[0], max_num_seqs=max_num_seqs)
        beside = 64 * (256 + 288) * 4 + 64 * 128 * 4
        assert activation_bytes(config.model.spec, config, "float32") == beside + num_logits * 97 * 4


def test_the_parts_add_up(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0])
    assert (found["total_bytes"], found["free_bytes"], found["weights_bytes"]) == (1000 * MIB, 800 * MIB, 7)
    assert found["budget_bytes"] == 400 * MIB
    parts = ("activations_bytes", "attention_gather_bytes", "available_kv_cache_bytes")
    assert sum(found[name] for name in parts) == found["budget_bytes"]
    assert found["attention_gather_bytes"] == pytest.approx(found["available_kv_cache_bytes"] / 3, rel=1e-6)


@pytest.mark.parametrize(("dtype", "copies"), [("float32", 5), ("bfloat16", 3), ("float16", 7)])
def test_what_is_gathered_in_fp8_is_expanded(tiny_llama: tuple[str, Any], dtype: str, copies: int) -> None:
    """Of one of three layers: its pages, and numbers of 4 or 2 bytes for each byte, or of both."""
    config = make_config(tiny_llama[0], max_num_seqs=100_000, kv_cache_dtype="fp8")
    found = memory_table(config, FakePlatform(), SPECS, dtype, weights_bytes=7)
    assert found["attention_gather_bytes"] == pytest.approx(found["available_kv_cache_bytes"] * copies / 3, rel=1e-6)


def test_the_share_and_the_ranks_divide_the_memory(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0], gpu_memory_utilization=0.9, tensor_parallel_size=2)
    assert found["budget_bytes"] == 360 * MIB


def test_bytes_given_are_taken_as_they_are(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0], kv_cache_bytes=123_456)
    assert found["available_kv_cache_bytes"] == 123_456
    assert "budget_bytes" not in found


def test_no_more_than_can_be_of_use(tiny_llama: tuple[str, Any]) -> None:
    """6 requests of 128 tokens have 32 blocks each; twice that, and the null block."""
    found = memory_table(make_config(tiny_llama[0]), FakePlatform(), SPECS, "float32", weights_bytes=0)
    assert found["available_kv_cache_bytes"] == (2 * 6 * 32 + 1) * 3 * (2 * 4 * 2 * 16 * 4)


def test_layers_that_share_tensors(tiny_llama: tuple[str, Any]) -> None:
    """Two layers of full attention and four with a window share two tensors, in three groups. A request of 128 tokens
    has 32 blocks in the full group, and 18 in each of the others: a window of 6 and 64 tokens in flight."""
    full = SPECS["layers.0.attention"]
    window = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32", sliding_window=6)
    specs: dict[str, KVCacheSpec] = {f"layers.{i}.attention": full if i % 3 == 2 else window for i in range(6)}
    options = {"steps_in_flight": 1, "max_num_seqs": 6}
    found = memory_table(make_config(tiny_llama[0], **options), FakePlatform(), specs, "float32", weights_bytes=0)
    assert found["available_kv_cache_bytes"] == (2 * 6 * (32 + 18 + 18) + 1) * 2 * (2 * 4 * 2 * 16 * 4)
    left = found["budget_bytes"] - found["activations_bytes"]
    assert found["attention_gather_bytes"] == left // 3


def test_too_little_memory_leaves_nothing(tiny_llama: tuple[str, Any]) -> None:
    assert table(tiny_llama[0], gpu_memory_utilization=1e-6)["available_kv_cache_bytes"] == 0


# Measured.


PEAKS = StepPeaks(largest_bytes=50 * MIB, decode_bytes=9 * MIB, num_graphs=3)


def measured(model: str, peaks: StepPeaks | None = PEAKS, **options: Any) -> dict[str, int]:
    config = make_config(model, max_num_seqs=100_000, **options)
    return memory_table(config, MeasuringPlatform(), SPECS, "float32", 7, peaks)


def test_measured_parts_add_up(tiny_llama: tuple[str, Any]) -> None:
    found = measured(tiny_llama[0])
    assert found["activations_bytes"] == 50 * MIB
    assert found["non_torch_bytes"] == 30 * MIB
    assert found["graphs_bytes"] == (70 + 32 + 9) * MIB + 3 * (12 * 3 + 30) * 3500
    tables = 2 * 4 * 100_000 * 32
    adjusted = (100_000 + 65_536) * 4 * (97 + 4)  # counts and masks, while they grow to their full size
    assert found["rows_bytes"] == tables + adjusted
    assert found["budget_bytes"] == 700 * MIB
    parts = ("activations_bytes", "graphs_bytes", "rows_bytes", "margin_bytes", "available_kv_cache_bytes")
    assert sum(found[name] for name in parts) == found["budget_bytes"]
    assert "attention_gather_bytes" not in found


def test_graphs_of_larger_mixed_steps_take_what_was_measured(tiny_llama: tuple[str, Any]) -> None:
    peaks = StepPeaks(50 * MIB, 9 * MIB, 3, mixed_bytes=5 * MIB)
    found, default = measured(tiny_llama[0], peaks), measured(tiny_llama[0])
    assert found["graphs_bytes"] == default["graphs_bytes"] + 5 * MIB
    assert found["available_kv_cache_bytes"] == default["available_kv_cache_bytes"] - 5 * MIB


def test_no_graphs_take_nothing(tiny_llama: tuple[str, Any]) -> None:
    assert measured(tiny_llama[0], StepPeaks(50 * MIB, 9 * MIB, 0))["graphs_bytes"] == 0


def test_bytes_given_are_taken_beside_what_was_measured(tiny_llama: tuple[str, Any]) -> None:
    found = measured(tiny_llama[0], kv_cache_bytes=123_456)
    assert (found["available_kv_cache_bytes"], found["activations_bytes"]) == (123_456, 50 * MIB)


def test_a_step_that_takes_more_than_was_computed_is_said(
    tiny_llama: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tiny_llama[0])
    bound = activation_bytes(config.model.spec, config, "float32") + 64 * MIB  # which torch may round to
    for largest in (bound, bound + 1):
        memory_table(config, MeasuringPlatform(), SPECS, "float32", 7, StepPeaks(largest, 0, 0))
    assert [record.getMessage() for record in caplog.records] == [
        f"a step takes {bound + 1} bytes, above the computed bound of {bound - 64 * MIB}"
    ]


class Steps:
    """What a model computed: (tokens, rows of logits) of each step."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        self.positions: list[list[int]] = []
        forward, compute_logits = model.forward, model.compute_logits

        def watched_forward(ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
            hidden: torch.Tensor = forward(ids, positions, ctx)
            assert torch.isfinite(hidden).all()
            self.positions.append(positions.tolist())
            return hidden

        def watched_logits(hidden: torch.Tensor) -> torch.Tensor:
            self.seen.append((len(self.positions[-1]), len(hidden)))
            logits: torch.Tensor = compute_logits(hidden)
            return logits

        monkeypatch.setattr(model, "forward", watched_forward)
        monkeypatch.setattr(model, "compute_logits", watched_logits)


def loaded_worker(model: str, platform: Platform, **options: Any) -> tuple[Worker, Any]:
    worker = Worker(make_config(model, **options), 0, None)
    worker.init_device()
    worker.load_model()
    worker._platform = platform
    assert worker._loaded is not None
    return worker, worker._loaded.model


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({}, (64, 6)),
        ({"max_model_len": 48}, (64, 6)),
        ({"max_num_batched_tokens": 4096}, (6 * 128, 6)),  # no step has more: six rows of 128 tokens
        ({"max_num_batched_tokens": 4}, (4, 4)),
    ],
)
def test_the_worker_measures_the_largest_steps(
    tiny_mixed: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], largest: tuple[int, int]
) -> None:
    worker, model = loaded_worker(tiny_mixed[0], MeasuringPlatform([MIB, 2 * MIB]), **options)
    steps = Steps(model, monkeypatch)
    table = worker.determine_available_memory()
    single = (min(6, largest[0]),) * 2
    sampled, of_prompts = steps.seen[::2], steps.seen[1::2]
    assert sampled[0] == single
    assert sampled[2:] == [largest, single]
    assert all(tokens == rows for tokens, rows in of_prompts), "all fit into one piece"
    assert max(max(positions) for positions in steps.positions) < worker.config.model.context_len
    assert steps.positions[-1] == [0] * single[0]
    assert table["activations_bytes"] == MIB
    assert table["graphs_bytes"] > 2 * MIB
    assert worker.memory()["activations_bytes"] == MIB


def test_enforce_eager_counts_no_graphs(tiny_llama: tuple[str, Any]) -> None:
    worker, _ = loaded_worker(tiny_llama[0], MeasuringPlatform([1, 1]), enforce_eager=True)
    assert worker.determine_available_memory()["graphs_bytes"] == 0


def test_a_step_that_does_not_fit_is_a_capacity_error(tiny_llama: tuple[str, Any]) -> None:
    class Full(MeasuringPlatform):
        def peak_bytes(self, run: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    worker, _ = loaded_worker(tiny_llama[0], Full())
    with pytest.raises(CapacityError, match=r"a step of 64 tokens does not fit .* 0\.78 GiB are free") as error:
        worker.determine_available_memory()
    assert error.value.details == {"available_bytes": 800 * MIB}


def test_a_cpu_measures_nothing(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(make_config(tiny_llama[0]), 0, None)
    worker.init_device()
    worker.load_model()
    assert worker._loaded is not None
    steps = Steps(worker._loaded.model, monkeypatch)
    table = worker.determine_available_memory()
    config = worker.config
    assert steps.seen == []
    assert table["activations_bytes"] == activation_bytes(config.model.spec, config, "float32")
    assert table.keys().isdisjoint({"graphs_bytes", "non_torch_bytes", "rows_bytes"})


def test_the_text_has_every_entry_in_mib() -> None:
    text = format_table(1, {"total_bytes": 1000 * MIB, "available_kv_cache_bytes": 3 * MIB // 2})
    assert [line.split() for line in text.splitlines()] == [
        ["memory", "of", "rank", "1,", "MiB:"],
        ["total", "1000.0"],
        ["available", "kv", "cache", "1.5"],
    ]


# What an error says would be enough, is.


def planned(config: Any, platform: Platform, specs: dict[str, KVCacheSpec]) -> Any:
    found = memory_table(config, platform, specs, "float32", 7, PEAKS if platform.measures_steps else None)
    return plan_kv_cache(
        [specs],
        [found["available_kv_cache_bytes"]],
        max_model_len=config.model.context_len,
        fit_max_model_len=False,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
        num_blocks_override=None,
        tables=[found],
    )


class SmallCard(MeasuringPlatform):
    """Of 1000 MiB this process has 20."""

    def memory_budget_bytes(self, asked_bytes: int) -> int:
        return min(asked_bytes - 20 * MIB, self.free_memory_bytes())

    def shared_memory_bytes(self, num_ranks: int) -> int:
        return self.total_memory_bytes()


@pytest.mark.parametrize("head_size", [16, 4096])
@pytest.mark.parametrize("platform", [FakePlatform(), SmallCard()])
@pytest.mark.parametrize("share", [0.001, 0.4])
def test_the_numbers_of_a_refusal_are_enough(
    tiny_llama: tuple[str, Any], platform: Platform, share: float, head_size: int
) -> None:
    specs: dict[str, KVCacheSpec] = {
        f"layers.{i}.attention": FullAttentionSpec(block_size=4, num_kv_heads=25, head_size=head_size, dtype="float32")
        for i in range(3)
    }
    config = make_config(tiny_llama[0], gpu_memory_utilization=share)
    try:
        planned(config, platform, specs)
    except CapacityError as caught:
        error = caught
    else:
        assert share == 0.4
        return
    details = error.details
    assert details["missing_bytes"] == details["needed_bytes"] - max(0, details["available_bytes"])
    assert details["budget"]["asked_bytes"] == int(share * platform.shared_memory_bytes(1))
    assert "weights 7 bytes" in error.message
    for option in ("gpu_memory_utilization", "kv_cache_bytes"):
        assert (option in details) == (f"raise {option} to" in error.message)
        if option in details:
            planned(make_config(tiny_llama[0], **{option: details[option]}), platform, specs)
    if fits := details["max_model_len"]:
        planned(make_config(tiny_llama[0], gpu_memory_utilization=share, max_model_len=fits), platform, specs)
    if head_size == 16:
        assert "gpu_memory_utilization" in details


def test_a_cpu_plans_with_three_quarters_of_what_its_control_group_leaves(
    tiny_llama: tuple[str, Any], tmp_path: Path
) -> None:
    """Of 200 MiB, 50 are used, 10 of them by file pages; the context is what fits into the rest."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a\n")
    group = tmp_path / "groups" / "a"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(200 * MIB))
    (group / "memory.current").write_text(str(50 * MIB))
    (group / "memory.stat").write_text(f"inactive_file {10 * MIB}\n")
    specs: dict[str, KVCacheSpec] = {
        f"layers.{i}.attention": FullAttentionSpec(block_size=4, num_kv_heads=25, head_size=4096, dtype="float32")
        for i in range(3)
    }
    config = make_config(tiny_llama[0], max_model_len="auto")
    found = memory_table(config, CpuPlatform(tmp_path, tmp_path / "groups"), specs, "float32", weights_bytes=7)
    assert (found["shared_bytes"], found["asked_bytes"]) == (160 * MIB, 120 * MIB)
    left = found["budget_bytes"] - found["activations_bytes"]
    assert found["available_kv_cache_bytes"] == left - left // 4
    plan = plan_kv_cache(
        [specs],
        [found["available_kv_cache_bytes"]],
        max_model_len=config.model.context_len,
        fit_max_model_len=True,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
        num_blocks_override=None,
    )
    assert 2 < plan.max_model_len == 4 * (plan.num_blocks - 1) < 128
