"""Kernels that are compiled while weights are read: that all of a step are found, and that nothing depends on it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from triton import JITFunction

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from test_precompile import run

from ringcore import EngineConfig
from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import ModelLoadError
from ringcore.kernels import rms_norm
from ringcore.kernels.launch.precompile import KernelCompiler, Variant
from ringcore.kernels.logits import sampling
from ringcore.worker.entry import create_worker
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.runner.loaded_model import BuiltModel
from ringcore.worker.start_up import compilers, kernel_list, kernel_warm_up
from ringcore.worker.start_up.kernel_warm_up import FewLayers, KernelWarmUp, has_room, set_up_libraries
from ringcore.worker.start_up.warm_up_steps import warm_up_steps

SCRIPT = """
    import sys
    import triton_for_sm90
    from ringcore.attention.backends.triton import TritonBackend
    from ringcore.model_executor import ops
    ops.has_kernels = lambda device: True
    TritonBackend.refusal = classmethod(lambda cls, *args, **kwargs: None)

    from ringcore import EngineConfig
    from ringcore.distributed.parallel import SingleRank
    from ringcore.worker.start_up.kernel_warm_up import FewLayers, intercept_steps
    from ringcore.worker.platforms.cpu import CpuPlatform

    config = EngineConfig.from_options(
        model={model!r}, load_format="dummy", max_num_seqs={max_num_seqs}, attention_backend="triton"
    ).on_device("cuda")
    caught = intercept_steps(FewLayers.of(config, SingleRank(), "bfloat16"), CpuPlatform(), SingleRank())
    print(*sorted({{variant.kernel.__name__ for variant in caught}}))
    print(len(caught), len({{(variant.kernel, variant.specialization) for variant in caught}}))
"""


def config_of(folder: str, **options) -> EngineConfig:
    return EngineConfig.from_options(model=folder, load_format="dummy", **options).on_device("cpu")


@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.long_form), 20])
def test_every_kernel_of_a_step_is_found(tiny_llama, tmp_path, max_num_seqs):
    folder, _ = tiny_llama
    names, numbers = run(SCRIPT.format(model=folder, max_num_seqs=max_num_seqs), tmp_path).splitlines()
    assert {"paged_decode_kernel", "_paged_attention_prefill", "_prepare_decode", "_finish_rows"} <= set(names.split())
    assert {"_plan_decode", "_qk_norm_rope_kernel", "_row_kernel", "_adjust_kernel", "_count_kernel"} <= set(
        names.split()
    )
    num_caught, num_different = map(int, numbers.split())
    assert num_caught == num_different > 10
    assert list(tmp_path.iterdir()) == [], "something was compiled"


LATENTS_SCRIPT = """
    import triton_for_sm90
    from ringcore.attention.backends.triton_mla import TritonMLABackend
    from ringcore.model_executor import ops
    TritonMLABackend.refusal = classmethod(lambda cls, *args, **kwargs: None)

    from ringcore import EngineConfig
    from ringcore.distributed.parallel import SingleRank
    from ringcore.worker.start_up.kernel_warm_up import FewLayers, intercept_steps
    from ringcore.worker.platforms.cpu import CpuPlatform

    config = EngineConfig.from_options(
        model={model!r}, load_format="dummy", max_num_seqs=4, attention_backend="triton_mla"
    ).on_device("cuda")
    few = FewLayers.of(config, SingleRank(), "bfloat16")
    ops.has_kernels = lambda device: True  # not before: layers are compared with the model's on the CPU
    caught = intercept_steps(few, CpuPlatform(), SingleRank())
    print(*sorted({{variant.kernel.__name__ for variant in caught}}))
"""


@pytest.mark.long_form
def test_every_kernel_of_latent_attention_is_found(tmp_path):
    """Of decodes, and of prompts that are long enough to be expanded."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    few = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"], "vocab_size": 200, **sizes, **few}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96, "max_position_embeddings": 512}))
    names = run(LATENTS_SCRIPT.format(model=str(folder)), tmp_path / "cache").split()
    assert {"_latent_attention_decode", "_latent_rows_kernel", "_rotate_heads_kernel", "_plan_decode"} <= set(names)
    assert {"_paged_attention_prefill", "_kv_write_kernel"} <= set(names)
    assert "paged_decode_kernel" not in names


RANKS_SCRIPT = """
    import torch
    import triton_for_sm90
    from ringcore.attention.backends.triton import TritonBackend
    from ringcore.model_executor import ops
    ops.has_kernels = lambda device: True
    TritonBackend.refusal = classmethod(lambda cls, *args, **kwargs: None)

    from ringcore import EngineConfig
    from ringcore.distributed.communicator import NcclCommunicator, PeerCollectives
    from ringcore.worker.start_up.kernel_warm_up import FewLayers, intercept_steps
    from ringcore.distributed.peer_memory import PeerMemory
    from ringcore.worker.platforms.cpu import CpuPlatform

    config = EngineConfig.from_options(
        model={model!r}, load_format="dummy", attention_backend="triton", tensor_parallel_size=2, device="cpu"
    )
    peers = PeerCollectives(PeerMemory(None, 1, [1 << 20, 1 << 21]), 1, torch.device("cpu"))
    tp = NcclCommunicator._of(1, 2, object(), peers if {has_peers} else None)
    caught = intercept_steps(FewLayers.of(config, tp, "bfloat16"), CpuPlatform(), tp)
    for name, specialization in sorted((variant.kernel.__name__, variant.specialization) for variant in caught):
        if name == "_collective_kernel":
            print(specialization)
"""


@pytest.mark.parametrize("has_peers", [True, pytest.param(False, marks=pytest.mark.long_form)])
def test_the_collectives_of_ranks_are_found(tiny_llama, tmp_path, has_peers):
    """Of the embedding, and of messages of either dtype into the residual stream. A launch would wait forever."""
    told = run(RANKS_SCRIPT.format(model=tiny_llama[0], has_peers=has_peers), tmp_path).splitlines()
    assert list(tmp_path.iterdir()) == [], "something was compiled"
    variants = [json.loads(line) for line in told]
    if not has_peers:
        assert variants == []
        return
    types = {tuple(one["signature"][name] for name in ("message", "residual", "out")) for one in variants}
    assert types == {("*bf16", "*bf16", "*bf16"), ("*bf16", "*fp32", "*fp32"), ("*fp32", "*fp32", "*fp32")}


EXPERTS_SCRIPT = """
    import torch
    import triton_for_sm90
    from ringcore.attention.backends.triton import TritonBackend
    from ringcore.model_executor import ops
    ops.has_kernels = lambda device: True
    TritonBackend.refusal = classmethod(lambda cls, *args, **kwargs: None)

    from ringcore import EngineConfig
    from ringcore.distributed import combine
    from ringcore.distributed.communicator import NcclCommunicator
    from ringcore.worker.start_up.kernel_warm_up import FewLayers, intercept_steps
    from ringcore.distributed.peer_memory import PeerMemory
    from ringcore.worker.platforms.cpu import CpuPlatform

    combine._LEAST_SAVED_BYTES, combine._LARGEST_SHARE = -(1 << 40), 1e9  # few rows are combined too
    config = EngineConfig.from_options(
        model={model!r}, load_format="dummy", attention_backend="triton", tensor_parallel_size=2, device="cpu",
        expert_parallel=True, redundant_experts=2,
    )
    peers = combine.PeerCombine(PeerMemory(None, 1, [1 << 20, 1 << 21]), 1, torch.device("cpu"))
    tp = NcclCommunicator._of(1, 2, object(), None, peers)
    caught = intercept_steps(FewLayers.of(config, tp, "bfloat16"), CpuPlatform(), tp)
    print(*sorted({{variant.kernel.__name__ for variant in caught}}))
"""


@pytest.mark.long_form
def test_the_kernels_of_whole_experts_are_found(tmp_path):
    """A launch of the combine would wait forever."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, **sizes}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | experts | {"max_position_embeddings": 512}))
    names = run(EXPERTS_SCRIPT.format(model=str(folder)), tmp_path / "cache").split()
    assert {"_combine_kernel", "_place_kernel", "_items_kernel", "grouped_kernel"} <= set(names)


@pytest.mark.parametrize("max_model_len", [1, 2, 20, 128])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 40])
def test_steps_stay_within_the_limits(tiny_llama, max_model_len, max_num_seqs):
    config = config_of(
        tiny_llama[0],
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(64, max_num_seqs),
    )
    admitted: dict[int, int] = {}
    for number, step in enumerate(warm_up_steps(config, [16])):
        assert step.step == number
        for row in step.finished_rows.tolist():
            del admitted[row]
        for new in step.new_requests:
            assert new.row not in admitted
            admitted[new.row] = len(new.token_ids)
            assert len(new.block_ids[0]) * 16 > len(new.token_ids)
        assert max(step.rows) < max_num_seqs
        assert set(step.rows.tolist()) <= admitted.keys()
        for row in step.rows.tolist():
            admitted[row] += 1
        assert max(admitted.values(), default=0) <= max_model_len + 1
        assert step.num_tokens <= config.scheduler.max_num_batched_tokens


def test_steps_have_the_kernels_of_long_prompts_and_of_many_rows_beside_a_prompt():
    scheduler = SimpleNamespace(token_budget=8192, max_num_seqs=16)
    config: Any = SimpleNamespace(model=SimpleNamespace(context_len=4096), scheduler=scheduler)
    steps = [step.num_scheduled_tokens for step in warm_up_steps(config, [16])]
    mixed = [sorted(one.tolist()) for one in steps if one is not None and len(one) > 2]
    assert mixed == [[1] * 8 + [16]]
    assert max(one.max() for one in steps if one is not None) == 2048


def test_a_driver_without_a_gpu_compiles_nothing(tiny_llama, monkeypatch, tmp_path):
    closed = []
    begun = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(compilers, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(compilers, "_start", lambda num: begun)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    create_worker(EngineConfig.from_options(model=tiny_llama[0], load_format="dummy"), 0, None)
    assert closed == [True]


class _FewBytes(CpuPlatform):
    def free_memory_bytes(self) -> int:
        return 1000


def warm_up(config: EngineConfig, platform: CpuPlatform | None = None) -> float:
    platform = platform or CpuPlatform()
    kernels = KernelWarmUp(config, platform, SingleRank())
    kernels.follow(BuiltModel.of(config, platform, SingleRank()))
    return kernels.finish()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where lists are kept, by the first start of a process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_warm_up, "_NUMBERS", itertools.repeat(0))
    return tmp_path / "ringcore" / "kernels"


def test_what_goes_wrong_is_told_and_costs_nothing_but_time(tiny_llama, caplog, monkeypatch, cache):
    config = config_of(tiny_llama[0])

    def fail(*args, **options):
        raise ArithmeticError("in the runner")

    monkeypatch.setattr(kernel_warm_up, "ModelRunner", fail)
    with caplog.at_level(logging.INFO, "ringcore.worker.start_up.kernel_warm_up"):
        assert warm_up(config) > 0
        assert "compiled on their first launch" in caplog.text
        assert "in the runner" in caplog.text
        assert not cache.exists()
        caplog.clear()
        assert warm_up(config, _FewBytes()) >= 0
    assert "no room" in caplog.text
    assert "in the runner" not in caplog.text
    few = FewLayers.of(config, SingleRank(), "float32")
    assert has_room(few, 1 << 39, 1 << 40)
    assert not has_room(few, 1 << 40, 1 << 40)


def test_libraries_are_set_up_for_the_longest_prompts(tiny_llama, monkeypatch):
    told = []
    monkeypatch.setattr(TorchSdpaBackend, "warm_up", lambda self, *numbers: told.append((self.num_heads, *numbers)))
    of_torch = {"attention_backend": TorchSdpaBackend.name}
    config = config_of(tiny_llama[0], max_model_len=100, max_num_batched_tokens=77, **of_torch)
    platform = CpuPlatform()
    set_up_libraries(config, BuiltModel.of(config, platform, SingleRank()), platform)
    assert told == [(config.model.spec.num_heads, 77, 100, platform.device)]


def test_libraries_that_fail_leave_the_kernels_compiled(tiny_llama, monkeypatch, caplog, cache):
    compiled = []

    def fail(*numbers):
        raise ArithmeticError("in the library")

    monkeypatch.setattr(TorchSdpaBackend, "warm_up", fail)
    monkeypatch.setattr(kernel_warm_up, "intercept_steps", lambda *arguments: [])
    finish = KernelCompiler.finish
    monkeypatch.setattr(KernelCompiler, "finish", lambda self: compiled.append(finish(self)))
    assert warm_up(config_of(tiny_llama[0], attention_backend=TorchSdpaBackend.name)) > 0
    assert len(compiled) == 1
    assert "in the library" in caplog.text


# As Triton makes them where it does not interpret.
RMS_NORM, ROW = JITFunction(rms_norm._rms_norm_kernel.fn), JITFunction(sampling._row_kernel.fn)
FOUND = [Variant(RMS_NORM, '{"n": 1}'), Variant(RMS_NORM, '{"n": 2}'), Variant(ROW, "{}")]


class _Starts:
    """Starts whose kernels are FOUND, and what each did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.compiled: list[Variant] = []
        self.failures = 0
        monkeypatch.setattr(kernel_warm_up, "intercept_steps", self._find)
        monkeypatch.setattr(kernel_warm_up, "KernelCompiler", lambda *arguments: self)

    def _find(self, few: FewLayers, platform: Any, tp: Any, found: Callable[[Variant], object]) -> list[Variant]:
        self.events.append("found")
        for variant in FOUND:
            found(variant)
        return FOUND

    def add(self, *variants: Variant) -> None:
        self.compiled += variants

    def __enter__(self) -> Self:
        return self

    def finish(self) -> None:
        """As long as compiling takes."""

    def __exit__(self, *exc: object) -> None:
        self.finish()
        self.failures -= 1
        if self.failures >= 0:
            self.compiled.clear()
            raise ArithmeticError("of Triton")
        self.events.append("compiled")

    def of(self, config: EngineConfig) -> list[str]:
        self.events.clear()
        self.compiled.clear()
        warm_up(config)
        assert self.compiled == FOUND
        return [*self.events]


@pytest.fixture
def starts(monkeypatch) -> _Starts:
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: f"of {self.fn.__name__}"))
    monkeypatch.setattr(rms_norm, "_rms_norm_kernel", RMS_NORM)
    monkeypatch.setattr(sampling, "_row_kernel", ROW)
    return _Starts(monkeypatch)


COLD, WARM = ["found", "compiled"], ["compiled"]


def test_a_later_start_finds_nothing_again(tiny_llama, starts, cache, caplog, monkeypatch):
    config = config_of(tiny_llama[0])
    assert starts.of(config) == COLD
    monkeypatch.setattr(kernel_warm_up, "FewLayers", None)  # no second model
    with caplog.at_level(logging.INFO, "ringcore.worker.start_up.kernel_warm_up"):
        assert starts.of(config) == WARM
    assert "3 kernels listed, loaded in" in caplog.text


def test_kernels_are_found_or_loaded_before_there_is_a_model(tiny_llama, starts, cache, caplog):
    """Also where there will be none, which is told elsewhere."""
    config = config_of(tiny_llama[0])
    for done in (COLD, WARM):
        starts.events.clear()
        assert KernelWarmUp(config, CpuPlatform(), SingleRank()).finish() > 0
        assert starts.events == done
    assert not caplog.records


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_model_is_built_when_kernels_are_found_or_listed(tiny_llama, starts, cache, monkeypatch, is_listed):
    """Not when they are compiled."""
    config, may_compile = config_of(tiny_llama[0]), threading.Event()
    if is_listed:
        assert starts.of(config) == COLD
        starts.events.clear()
    monkeypatch.setattr(starts, "finish", lambda: may_compile.wait(60))
    kernels = KernelWarmUp(config, CpuPlatform(), SingleRank())
    assert starts.events == ([] if is_listed else ["found"])
    may_compile.set()
    kernels.finish()
    assert starts.events == (WARM if is_listed else COLD)


def test_a_model_that_cannot_be_built_is_told_once(tiny_llama, cache, caplog, monkeypatch):
    def fail(*arguments):
        raise ModelLoadError("no such model")

    monkeypatch.setattr(kernel_warm_up, "FewLayers", SimpleNamespace(of=fail))
    kernels = KernelWarmUp(config_of(tiny_llama[0]), CpuPlatform(), SingleRank())
    kernels.finish()
    assert not caplog.records


def test_lists_are_of_a_configuration_and_of_the_sources(tiny_llama, starts, cache, tmp_path, monkeypatch):
    config, other = config_of(tiny_llama[0]), config_of(tiny_llama[0], max_num_seqs=3)
    assert [starts.of(one) for one in (config, other, config, other)] == [COLD, COLD, WARM, WARM]
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(kernel_list, "_PACKAGE", tmp_path / "sources")
    assert [starts.of(config), starts.of(config)] == [COLD, WARM]
    (tmp_path / "sources" / "new.py").write_text("pass")
    assert [starts.of(config), starts.of(config)] == [COLD, WARM]
    kernels = tmp_path / "sources" / "kernels" / "one.py"
    kernels.parent.mkdir()
    for content in ("a = 1", "a = 2"):  # of one size, and one time
        kernels.write_text(content)
        os.utime(kernels, (1, 1))
        assert [starts.of(config), starts.of(config)] == [COLD, WARM]


def _other(name: str, value: object) -> Callable[[str], str]:
    def change(text: str) -> str:
        content = json.loads(text)
        content["kernels"][1][name] = value
        return json.dumps(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: json.dumps(json.loads(text) | {"kernels": []}),
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        _other("cache_key", 1),
        _other("name", "_gone_kernel"),
        _other("name", "rms_norm"),
        _other("module", "ringcore.kernels.gone"),
        _other("module", "this"),
        _other("module", 1),
        _other("specialization", "{"),
        _other("specialization", None),
    ],
)
def test_what_does_not_fit_is_found_and_written_again(tiny_llama, starts, cache, change):
    config = config_of(tiny_llama[0])
    assert starts.of(config) == COLD
    (path,) = cache.glob("*.json")
    path.write_text(change(path.read_text()))
    assert [starts.of(config), starts.of(config)] == [COLD, WARM]
    assert "this" not in sys.modules, "what is listed was imported"


def test_a_list_that_cannot_be_loaded_is_dropped(tiny_llama, starts, cache, caplog):
    """Some of its kernels may have been loaded, and would be missing in a list of those that are found now."""
    config = config_of(tiny_llama[0])
    assert starts.of(config) == COLD
    starts.failures = 1
    assert starts.of(config) == COLD
    assert "cannot be loaded" in caplog.text
    assert [starts.of(config), starts.of(config)] == [COLD, WARM]


def test_kernels_that_do_not_compile_are_not_listed(tiny_llama, starts, cache):
    config = config_of(tiny_llama[0])
    starts.compiled, starts.failures = FOUND, 1
    assert starts.of(config) == ["found"]
    assert not cache.exists()


def test_a_second_engine_of_a_process_lists_nothing(tiny_llama, starts, cache, monkeypatch):
    """What the first one compiled is not found again."""
    monkeypatch.setattr(kernel_warm_up, "_NUMBERS", itertools.count(1))
    assert starts.of(config_of(tiny_llama[0])) == COLD
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_told(tiny_llama, starts, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file")
    assert starts.of(config_of(tiny_llama[0])) == COLD
    assert "not listed" in caplog.text


LISTED_SCRIPT = """
    import sys
    import torch
    import triton_for_sm90
    from pathlib import Path
    from ringcore.kernels.activation import silu_and_mul
    from ringcore.kernels.launch.precompile import compile_variants, intercept_launches
    from ringcore.worker.start_up.kernel_list import KernelList

    listed = KernelList(Path({folder!r}), {{"a": "key"}})
    variants = listed.read()
    if variants is None:
        with intercept_launches() as intercepted:
            silu_and_mul(torch.ones(1, 64))
        listed.write([*intercepted.values()])
    else:
        compile_variants(variants, torch.device("cpu"), 1)
        with intercept_launches() as intercepted:
            silu_and_mul(torch.ones(1, 64))
    print(len(intercepted))
"""


def test_what_is_listed_is_what_is_launched(tmp_path):
    script = LISTED_SCRIPT.format(folder=str(tmp_path / "lists"))
    assert [run(script, tmp_path / "cache").strip() for _ in range(2)] == ["1", "0"]
