"""The GEMV in CUDA C++ for one row of 4 bits: its numbers on a Hopper GPU, or on a CPU by `cuda_on_cpu`; its choice,
its launch and its arguments; its machine code where NVRTC is installed."""

from __future__ import annotations

import enum
import importlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_on_cpu
import pytest
import torch
from sass import disassemble

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.kernels.launch import cuda_kernel
from ringcore.kernels.launch.cuda_kernel import NUMBERS
from ringcore.kernels.launch.nvrtc import compile_cuda, nvrtc_version
from ringcore.kernels.launch.precompile import Variant, intercept_launches
from ringcore.kernels.linears import int8_gemv as gemv
from ringcore.kernels.linears import int8_gemv_configs
from ringcore.kernels.linears.int8_gemv import int8_gemv, specialization
from ringcore.kernels.linears.int8_gemv_configs import choose_int8_gemv, fits_int8_gemv, int8_gemv_config
from ringcore.kernels.linears.packed_weight import NIBBLES, PackedWeight
from ringcore.kernels.linears.skinny_linear import Activation, skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import Int8GemvConfig, PackedFmaConfig
from ringcore.kernels.partials import RowNorm
from ringcore.model_executor import ops
from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.decoder import DenseDecoder
from ringcore.model_executor.models.int8_gemvs import agree_on_int8_gemv
from ringcore.worker.start_up.kernel_list import KernelList

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
QWEN3_BY_AWQ = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 64,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(
    num_weights: int, num_inputs: int, *, zeros: bool = True, by_group: bool = False, seed: int = 0
) -> tuple[PackedWeight, torch.Tensor]:
    """A weight, and its numbers in float32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (num_weights, num_inputs), generator=generator)
    groups = num_inputs // 128
    scales = torch.rand(num_weights, groups, generator=generator) * 0.02 + 0.001
    of_groups = torch.full((num_weights, groups), 8)
    if zeros:
        of_groups = torch.randint(0, 17, (num_weights, groups), generator=generator)
        scales = ((scales.view(torch.int32) & -32) | of_groups.int()).view(torch.float32)
    quads = codes.view(num_weights, groups, 4, 32).transpose(2, 3)
    words = (quads * torch.tensor([1, 16, 256, 4096])).sum(-1).to(torch.int32).to(torch.int16)
    weight = PackedWeight(
        words.reshape(num_weights, num_inputs // 4).to(DEVICE),
        (scales.t().contiguous().t() if by_group else scales).to(DEVICE),
        (num_weights, num_inputs),
        torch.bfloat16,
        NIBBLES,
        num_inputs // 4,
        128,
        zero=0 if zeros else 8,
        run=32,
        has_zero_bits=zeros,
    )
    numbers = (codes.view(num_weights, groups, 128) - of_groups[:, :, None]) * scales[:, :, None]
    return weight, numbers.view(num_weights, num_inputs).to(DEVICE)


def row(num_inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, num_inputs, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.fixture
def seeds() -> Iterator[int]:
    """Of the turns of threads on a CPU; odd: memory is fast, even: slow."""
    return itertools.count(1)


@pytest.fixture
def runs(seeds: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs: on the GPU, or on a CPU."""
    if HAS_HOPPER:
        return
    if cuda_on_cpu.COMPILER is None or torch.cuda.is_available():
        pytest.skip("needs a Hopper GPU, or none and a C++ compiler")
    threads = 32 * Int8GemvConfig.num_warps
    launch = cuda_on_cpu.launcher(Path(gemv.__file__).with_suffix(".cu"), threads, lambda: next(seeds), (NUMBERS,))
    monkeypatch.setattr(int8_gemv, "launch", launch)
    monkeypatch.setattr(gemv, "tensor_map", cuda_on_cpu.tensor_map)


LAYOUTS = [(True, True), (True, False), (False, False)]
ON_CPU = [(8, 512, True, True), (104, 2560, True, False), (40, 1024, False, False)]
SIZES = itertools.product([8, 104, 2560, 6144], [512, 1024, 2560, 4096, 9728, 12288])
ON_GPU = [(*size, *layout) for size in SIZES for layout in LAYOUTS]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "zeros", "by_group"),
    [*ON_CPU, *(pytest.param(*one, marks=on_hopper) for one in ON_GPU if one not in ON_CPU)],
)
def test_product(num_outputs: int, num_inputs: int, zeros: bool, by_group: bool) -> None:
    weight, numbers = packed(num_outputs, num_inputs, zeros=zeros, by_group=by_group)
    x = row(num_inputs, torch.bfloat16)
    out = torch.empty(1, num_outputs, device=DEVICE)
    found = skinny_linear(x, weight, Int8GemvConfig(), out=out)
    assert off(found, x.double() @ numbers.double().t()) < 2e-6


ON_CPU_TOO = [
    (torch.bfloat16, None, False, False),
    (torch.float16, "silu", True, True),
    (torch.bfloat16, "gelu_tanh", False, False),
]
FUSED = [*itertools.product([torch.bfloat16, torch.float16], [None, "silu", "gelu_tanh"], [False, True], [False, True])]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("dtype", "activation", "has_bias", "by_group"),
    [*ON_CPU_TOO, *(pytest.param(*one, marks=on_hopper) for one in FUSED if one not in ON_CPU_TOO)],
)
def test_prologue_and_epilogues(
    dtype: torch.dtype, activation: Activation | None, has_bias: bool, by_group: bool
) -> None:
    weight, numbers = packed(200, 2560, by_group=by_group)
    weight = replace(weight, dtype=dtype)
    bias = row(200, dtype, 3)[0] if has_bias else None
    norm = RowNorm((1 + row(2560, dtype, 2)[0] / 10).contiguous(), 1e-6)
    x = 30 * row(2560, torch.float32)
    expected = skinny_linear_reference(x, numbers, bias=bias, norm=norm, activation=activation)
    found = skinny_linear(x, weight, Int8GemvConfig(), bias=bias, norm=norm, activation=activation)
    assert found.dtype == dtype
    assert off(found, expected) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    if activation is None:
        stream = row(200, torch.float32, 4)
        expected = skinny_linear_reference(x, numbers, bias=bias, norm=norm, add_to=stream.clone())
        assert off(skinny_linear(x, weight, Int8GemvConfig(), bias=bias, norm=norm, add_to=stream), expected) < 5e-6


@pytest.mark.usefixtures("runs")
def test_outliers_cost_the_others_nothing() -> None:
    """An input 4,096 times the others, whose weights are 0."""
    weight, numbers = packed(64, 1024, zeros=False)
    weight.codes[:, 0] = (weight.codes[:, 0] & ~15) | 8
    numbers[:, 0] = 0
    x = row(1024, torch.bfloat16)
    x[0, 0] = 4096
    out = torch.empty(1, 64, device=DEVICE)
    assert off(skinny_linear(x, weight, Int8GemvConfig(), out=out), x.double() @ numbers.double().t()) < 1e-3


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_seen(value: float) -> None:
    weight, _ = packed(64, 1024)
    x = row(1024, torch.bfloat16)
    x[0, 700] = value
    assert not skinny_linear(x, weight, Int8GemvConfig()).isfinite().any()


@pytest.mark.usefixtures("runs")
def test_stages_land_in_any_order(seeds: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, through whose ring 24 stages go, in a slow memory too. With 7 stages, whose slots are not always for
    the same warps, 16 of 40 such runs were wrong or hung."""
    monkeypatch.setattr(gemv, "_num_sms", lambda device: 1)
    weight, numbers = packed(96, 4096)
    x, out = row(4096, torch.bfloat16), torch.empty(1, 96, device=DEVICE)
    for _ in range(4):
        skinny_linear(x, weight, Int8GemvConfig(), out=out.fill_(0))
        assert off(out, x.double() @ numbers.double().t()) < 2e-6


@on_hopper
def test_many_launches_in_a_graph() -> None:
    """Programs of two kernels are on an SM at once, and wait for stages that are still on their way."""
    weight, _ = packed(4096, 12288)
    x, stream = row(12288, torch.bfloat16), torch.zeros(1, 4096, device=DEVICE)
    first = skinny_linear(x, weight, Int8GemvConfig(), add_to=stream.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            skinny_linear(x, weight, Int8GemvConfig(), add_to=stream)
    for _ in range(500):
        stream.zero_()
        graph.replay()
    assert off(stream, 20 * first) < 1e-6


@pytest.mark.parametrize(
    ("num_weights", "num_inputs", "is_chosen"),
    [
        (6144, 4096, True),
        (4096, 4096, True),
        (2 * 12288, 4096, True),
        (4096, 12288, True),
        (2560, 9728, False),  # 160 tiles: some SMs have two, others one
        (4096, 17408, False),  # no room for a row and a ring beside another kernel's
        (4096, 1024, False),
        (64, 4096, False),
    ],
)
def test_choice(num_weights: int, num_inputs: int, is_chosen: bool) -> None:
    assert choose_int8_gemv(num_weights, num_inputs) == (Int8GemvConfig() if is_chosen else None)


def test_what_fits() -> None:
    weight, _ = packed(64, 1024)
    assert fits_int8_gemv(weight)
    assert fits_int8_gemv(packed(64, 1024, by_group=True)[0])
    others: list[dict[str, Any]] = [
        {"run": 8},
        {"group_size": 64},
        {"group_offset": 64},
        {"zeros": torch.zeros(64, 8)},
        {"index": torch.zeros(1024)},
        {"row_stride": 512},
        {"dtype": torch.float32},
        {"scales": weight.scales.half()},
        {"scales": torch.ones(64, 16, device=DEVICE)[:, ::2]},
        {"codes": weight.codes.flatten()[1:]},
    ]
    for other in others:
        assert not fits_int8_gemv(replace(weight, **other)), other
    assert not fits_int8_gemv(packed(64, 1152)[0])  # TMA's scales begin at 16 bytes
    assert not fits_int8_gemv(packed(60, 1024, by_group=True)[0])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_gemv_configs, "has_wgmma", lambda device: True)
    monkeypatch.setattr(int8_gemv_configs, "nvrtc_version", lambda: (13, 0))


def test_only_on_hopper_with_nvrtc(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = packed(2112, 2048)
    assert int8_gemv_config(weight) == Int8GemvConfig()
    monkeypatch.setattr(int8_gemv_configs, "nvrtc_version", lambda: None)
    assert int8_gemv_config(weight) is None


def linears(*sizes: tuple[int, int]) -> list[Any]:
    """Bound, of products of so many outputs and inputs."""
    found = []
    for i, size in enumerate(sizes):
        layer = object.__new__(RowParallelLinear if i % 2 else ColumnParallelLinear)
        layer._product = KernelProduct(packed(*size)[0], None)
        found.append(layer)
    return found


def config_of_one_row(layer: Any) -> object:
    product = layer.product
    return product._choose(*product.weight.shape, 1, is_gated=False)


def test_all_of_a_model_or_none(hopper: None) -> None:
    layers = linears((2112, 2048), (2112, 2560))
    assert isinstance(config_of_one_row(layers[0]), PackedFmaConfig)
    agree_on_int8_gemv(layers)
    assert [config_of_one_row(layer) for layer in layers] == [Int8GemvConfig()] * 2
    eight = layers[0].product
    assert eight._choose(*eight.weight.shape, 8, is_gated=False) == eight.weight.choose(*eight.weight.shape, 8)
    layers = linears((2112, 2048), (64, 2560))
    agree_on_int8_gemv(layers)
    assert all(isinstance(config_of_one_row(layer), PackedFmaConfig) for layer in layers)
    layers = linears((2112, 2048))
    layers[0]._product = layers[0].product.batch_invariant()
    agree_on_int8_gemv(layers)
    assert config_of_one_row(layers[0]) != Int8GemvConfig()
    dense = linears((2112, 2048))
    dense[0]._product = KernelProduct(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    layers = [*linears((2112, 2048)), *dense]
    agree_on_int8_gemv(layers)
    assert isinstance(config_of_one_row(layers[0]), PackedFmaConfig)


def test_a_native_model_by_awq(hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_BY_AWQ))
    spec = read_model_spec(find_model(tmp_path, "dummy"), FAMILIES)
    model = build_model(spec, SingleRank(), torch.bfloat16, 64)
    model.bind({weight.name: torch.zeros(weight.shape, dtype=weight.dtype) for weight in model.weights()})
    assert isinstance(model, DenseDecoder)
    found = [one for one in model._weighted if isinstance(one, ColumnParallelLinear | RowParallelLinear)]
    assert [config_of_one_row(layer) for layer in found] == [Int8GemvConfig()] * 4


class Result(enum.IntEnum):
    CUDA_ERROR_INVALID_VALUE = 1


class Driver:
    """What is asked of the driver to load a kernel, describe tensors and launch; functions return 0 and a result."""

    def __init__(self) -> None:
        self.maps: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.attributes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuuint"):
            return int
        if name in ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeValue"):
            return SimpleNamespace
        return _Names()

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, Any]:
        return 0, cubin

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, Any]:
        return 0, (module, name)

    def cuFuncSetAttribute(self, function: Any, attribute: str, value: int) -> tuple[int]:
        self.attributes[attribute] = value
        return (0,)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
        self.maps.append(arguments)
        return 0, f"map {len(self.maps)}"

    def cuLaunchKernelEx(self, *arguments: Any) -> tuple[int]:
        self.launches.append(arguments)
        return (0,)


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    target = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: SimpleNamespace(arch=90))
    monkeypatch.setattr(cuda_kernel, "triton_driver", SimpleNamespace(active=target))
    monkeypatch.setattr(cuda_kernel, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_kernel, "take_all_shared_memory", lambda device: None)
    monkeypatch.setattr(cuda_kernel, "compile_cuda", lambda source, architecture, macros: architecture.encode())
    monkeypatch.setattr(cuda_kernel, "supports_pdl", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(int8_gemv, "_loaded", {})
    cuda_kernel.tensor_map.cache_clear()
    return fake


def test_launch(driver: Driver) -> None:
    weight, _ = packed(2 * 96, 1024, by_group=True)
    norm, x = RowNorm(torch.ones(1024, dtype=torch.bfloat16), 1e-5), row(1024, torch.float32)
    out = skinny_linear(x, weight, Int8GemvConfig(), norm=norm, activation="silu")
    (config, function, (values, types), _) = driver.launches[0]
    assert function == (b"sm_90a", b"int8_gemv")
    assert (config.gridDimX, config.blockDimX, config.hStream) == (12, 288, 5)
    assert config.sharedMemBytes == Int8GemvConfig().shared_bytes(1024, 1)
    assert driver.attributes["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"] == config.sharedMemBytes
    assert driver.attributes["CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"] == 100
    assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    pointers = [x.data_ptr(), norm.gain.data_ptr(), x.data_ptr(), out.data_ptr()]
    assert values == ("map 1", "map 2", *pointers, 96, 1e-5)
    assert types[:2] == (None, None)
    codes, scales = driver.maps
    assert codes[1:6] == (4, weight.codes.data_ptr(), [128, 96, 2, 4], [512, 96 * 512, 128], [128, 8, 2, 4])
    assert scales[1:6] == (3, weight.scales.data_ptr(), [96, 2, 8], [4 * 96, 4 * 192], [8, 2, 8])
    skinny_linear(x, weight, Int8GemvConfig(), norm=norm, activation="silu", out=out)
    assert len(driver.launches) == 2
    assert len(driver.maps) == 2  # known


def test_scales_by_output(driver: Driver) -> None:
    weight, _ = packed(96, 1024)
    skinny_linear(row(1024, torch.bfloat16), weight, Int8GemvConfig())
    codes, scales = driver.maps
    assert codes[3:6] == ([128, 96, 1, 4], [512, 96 * 512, 128], [128, 16, 1, 4])
    assert scales[3:6] == ([8, 96, 1], [32, 96 * 32], [8, 16, 1])


def test_an_error_of_the_driver_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *arguments: (Result.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"):
        skinny_linear(row(1024, torch.bfloat16), packed(96, 1024)[0], Int8GemvConfig())


def test_it_is_found_before_its_launch(driver: Driver) -> None:
    weight, x = packed(96, 1024)[0], row(1024, torch.bfloat16)
    with intercept_launches() as found:
        for _ in range(2):
            skinny_linear(x, weight, Int8GemvConfig())
    (variant,) = found.values()
    assert variant.kernel is int8_gemv
    assert json.loads(variant.specialization)["macros"]["NUM_INPUTS"] == 1024
    assert not driver.launches
    named = variant.kernel.fn  # by which another process finds it
    assert getattr(importlib.import_module(named.__module__), named.__name__) is int8_gemv
    _ = variant.kernel.preload(variant.specialization).run
    with intercept_launches() as found:
        skinny_linear(x, weight, Int8GemvConfig())
    assert not found  # loaded
    skinny_linear(x, weight, Int8GemvConfig())
    assert len(driver.launches) == 1


def test_it_is_listed_for_the_next_start(tmp_path: Path) -> None:
    listed, variant = KernelList(tmp_path, {"a": "key"}), Variant(int8_gemv, json.dumps({"macros": {}}))
    listed.write([variant])
    assert listed.read() == [variant]


@pytest.mark.skipif(nvrtc_version() is None, reason="needs NVRTC")
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "is_gated", "has_norm"),
    [(6144, 4096, False, True), (4096, 4096, False, False), (12288, 4096, True, True), (4096, 12288, False, False)],
)
def test_compiled_for_an_h200(
    num_outputs: int, num_inputs: int, is_gated: bool, has_norm: bool, tmp_path: Path
) -> None:
    """Nothing is spilled, and two programs have the registers of an SM; a product loops over pairs of groups."""
    weight = packed(16, num_inputs, by_group=True)[0]
    x = torch.empty(1, num_inputs, dtype=torch.float32 if has_norm else torch.bfloat16)
    out = torch.empty(1, num_outputs)
    options = {"has_bias": False, "is_gated": is_gated, "is_gelu": False, "adds": not has_norm}
    _, content = specialization(x, weight, x, x, out, has_norm, Int8GemvConfig(), options)
    macros = [f"{name}={value}" for name, value in json.loads(content)["macros"].items()]
    cubin = compile_cuda(int8_gemv.src, "sm_90a", macros, tmp_path)
    instructions, _ = disassemble(cubin, tmp_path)
    names = [one.name for one in instructions]
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    assert sum(name.startswith("IMMA") for name in names) == 16
    registers = [
        int(number) for one in instructions for name in one.operands for number in re.findall(r"\bR(\d+)", name)
    ]
    assert max(registers) < 112
