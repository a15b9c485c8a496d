"""What every attention backend must do, against attention over whole sequences.

Each runs on the device that it is for. Where there is no GPU, "triton" runs in Triton's interpreter, on the CPU: that
takes seconds a case, so there it has the few that `matrix` is given for it; tests/kernels has more of the kernels.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attention_bench import CPU, HAS_GPU, OF_A_CPU, RUNS_ON, Bench, layer_of, refusal, run_case, spec_of
from samples import sampled

from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, MLASpec

# The smallest blocks that each takes.
SMALL = {"triton": 16, "triton_rows": 16, "flash_attn": 16, "torch_sdpa": 4, "cpu_attn": 4}
DECODE = [(4, 1), (17, 1), (1, 1), (63, 1), (16, 1)]
EQUAL_DECODE = [(12, 1), (12, 1), (12, 1)]
PROMPTS = [(0, 7), (0, 7), (0, 16), (0, 33), (0, 2), (0, 1)]
CHUNKS = [(16, 16), (5, 9), (64, 3), (1, 30)]
DECODES_FIRST = [(40, 1), (3, 1), (0, 5), (16, 11), (20, 1), (0, 1), (48, 2)]
MIXED = [(40, 1), (0, 5), (0, 5), (16, 11), (3, 1), (0, 1), (100, 1), (48, 2)]
LONG = [(700, 1), (300, 290), (900, 1), (20, 1)]
LONG_INTERPRETED = [(70, 1), (30, 60), (5, 1)]


def is_here(name: str) -> bool:
    """Whether the backend can run on this machine, on its own device or interpreted."""
    if name == "triton_rows":  # without a GPU test_batch_invariance.py has it
        return HAS_GPU
    if name == "triton":
        return importlib.util.find_spec("triton") is not None
    return refusal(name, FullAttentionSpec(256, 1, 64, "float16"), layer_of(1)) is None


ALIASES = {"triton_rows": "triton"}
NAMES = [name for name in BACKENDS if is_here(name)]


def matrix(values: Mapping[str, Iterable[Any]], interpreted: Iterable[Any], later: Iterable[Any] = ()) -> list[Any]:
    """(name, *value) for all `values` of each backend that is here; without a GPU "triton" has `interpreted` alone.
    "triton_rows" has what "triton" has, on a GPU. Backends of a CPU have a sample of them in the short form, and
    "triton" in the interpreter is without those of `interpreted` that are in `later`."""
    params: list[Any] = []
    for name in NAMES:
        is_interpreted = name == "triton" and not HAS_GPU
        rows: list[Any] = [
            (name, *(value if isinstance(value, tuple) else (value,)))
            for value in (interpreted if is_interpreted else values[ALIASES.get(name, name)])
        ]
        if RUNS_ON[name] == "cpu":
            rows = sampled(rows)
        elif is_interpreted:
            rows = [pytest.param(*row, marks=pytest.mark.long_form) if row[1:] in later else row for row in rows]
        params += rows
    return params


def product(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*axes))


def half_if_needed(name: str) -> str:
    return "float16" if name == "flash_attn" else "float32"


CASES = {
    "decode": DECODE,
    "equal": EQUAL_DECODE,
    "prompts": PROMPTS,
    "chunks": CHUNKS,
    "mixed": MIXED,
    "first": DECODES_FIRST,
}
BLOCK_SIZES = {
    "triton": [16, 48, 64],
    "flash_attn": [16, 64, 256],
    "torch_sdpa": [1, 4, 16, 64],
    "cpu_attn": [1, 4, 48],
}
BOTH = [False, True]


@pytest.mark.parametrize(
    ("name", "block_size", "case", "consecutive"),
    matrix(
        {name: product(sizes, CASES, BOTH) for name, sizes in BLOCK_SIZES.items()},
        [(16, "decode", True), (64, "equal", False), (16, "prompts", False), (48, "first", False)],
    ),
)
def test_every_kind_of_step(name: str, block_size: int, case: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(block_size, 2, half_if_needed(name)), 6), CASES[case], consecutive)


HEADS = [(1, 1), (4, 4), (4, 1), (9, 3)]


@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads", "window"),
    matrix(
        {
            "triton": [(*heads, window) for heads in [*HEADS, (14, 2), (7, 1), (8, 1)] for window in (None, 7, 20)],
            "flash_attn": [(*heads, None) for heads in HEADS],
            "torch_sdpa": [(*heads, window) for heads in HEADS for window in (None, 7)],
            "cpu_attn": [(*heads, window) for heads in [*HEADS, (14, 2), (71, 1)] for window in (None, 7)],
        },
        [(4, 1, 20)],
    ),
)
def test_head_groupings(name: str, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    spec = spec_of(SMALL[name], num_kv_heads, half_if_needed(name), window)
    run_case(Bench(name, spec, num_heads), MIXED)


@pytest.mark.parametrize(
    ("name", "dtype", "consecutive"),
    matrix(dict.fromkeys(BACKENDS, product(["bfloat16", "float16"], BOTH)), [("float16", False)]),
)
def test_half_formats(name: str, dtype: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(16, 2, dtype), 4), MIXED, consecutive)


@pytest.mark.parametrize(("name", "consecutive"), matrix(dict.fromkeys(BACKENDS, BOTH), [False]))
def test_long_contexts_and_chunks_of_several_tiles(name: str, consecutive: bool) -> None:
    bench = Bench(name, spec_of(16, 4, half_if_needed(name)), 8)
    run_case(bench, LONG_INTERPRETED if bench.is_interpreted else LONG, consecutive)


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_over_many_steps_among_others(name: str) -> None:
    bench = Bench(name, spec_of(SMALL[name], 2, half_if_needed(name)), 4, seed=3)
    bench.allocate([40, 30, 50, 20], consecutive=False)
    for parts in ([(0, 5)], [(0, 3), (1, 9)], [(2, 17), (0, 1), (1, 1)], [(3, 1), (2, 2)], [(3, 1), (0, 1), (1, 1)]):
        bench.check(parts)


@pytest.mark.parametrize("name", NAMES)
def test_decode_padding_never_lets_old_numbers_through(name: str) -> None:
    """Two like lengths share a batch; the shorter one's padding is old numbers and the null block."""
    bench = Bench(name, spec_of(SMALL[name], 1, half_if_needed(name)), 2)
    bench.allocate([6, 15], consecutive=False)
    bench.step([(0, 5), (1, 14)])
    bench.cache[bench.cache.abs() > 20] = 1e30 if bench.dtype == torch.float32 else 6e4
    bench.check([(0, 1), (1, 1)])


# Sliding windows. In every step, blocks that the window has passed hold NaN, and their table entries ids or zeros.

WINDOWS = {
    "triton": [(16, 1), (16, 15), (16, 16), (16, 17), (16, 33), (48, 20), (64, 70)],
    "flash_attn": [],
    "torch_sdpa": [(1, 5), (4, 1), (4, 3), (4, 4), (4, 5), (4, 18), (16, 9), (16, 33)],
    "cpu_attn": [(1, 5), (4, 4), (16, 33)],
}


@pytest.mark.parametrize(
    ("name", "block_size", "window", "case", "consecutive"),
    matrix(
        {name: [(*size, *of) for size in sizes for of in product(CASES, BOTH)] for name, sizes in WINDOWS.items()},
        [(16, 17, "decode", False), (16, 1, "equal", False)],
    ),
)
def test_windows_smaller_and_larger_than_a_block(
    name: str, block_size: int, window: int, case: str, consecutive: bool
) -> None:
    run_case(Bench(name, spec_of(block_size, 2, window=window), 6), CASES[case], consecutive)


@pytest.mark.parametrize(
    ("name", "dtype", "window"),
    matrix(dict.fromkeys(BACKENDS, product(["bfloat16", "float16"], [6, 16])) | {"flash_attn": []}, []),
)
def test_windows_of_half_formats(name: str, dtype: str, window: int) -> None:
    run_case(Bench(name, spec_of(SMALL[name], 2, dtype, window), 4), MIXED)


@pytest.mark.parametrize(
    ("name", "dtype", "window"),
    matrix(
        dict.fromkeys(BACKENDS, product(["float32", "bfloat16"], [None, 20])) | {"flash_attn": [("bfloat16", None)]},
        [],
    ),
)
def test_heads_of_256(name: str, dtype: str, window: int | None) -> None:
    run_case(Bench(name, spec_of(16, 1, dtype, window, head_size=256), 4), MIXED)


@pytest.mark.parametrize(
    ("name", "window", "consecutive"),
    matrix(dict.fromkeys(BACKENDS, product([40, 256, 500, 800], BOTH)) | {"flash_attn": []}, [(40, False)]),
)
def test_windows_over_chunks_and_prompts_of_several_tiles(name: str, window: int, consecutive: bool) -> None:
    bench = Bench(name, spec_of(16, 2, window=window), 4)
    run_case(bench, LONG_INTERPRETED if bench.is_interpreted else LONG, consecutive)


CHUNKINGS = [[1] * 40, [4] * 10, [5, 3, 8, 1, 1, 7, 15], [13, 1, 26], [40]]


@pytest.mark.parametrize(
    ("name", "window", "chunks"),
    matrix(
        {
            "triton": product([1, 4, 9, 16, 21], CHUNKINGS),
            "flash_attn": [],
            "torch_sdpa": product([1, 4, 6, 9], CHUNKINGS),
            "cpu_attn": product([1, 9], CHUNKINGS),
        },
        [(9, [13, 1, 26])],
    ),
)
def test_a_window_over_chunks_of_any_length(name: str, window: int, chunks: list[int]) -> None:
    """Beside it a sequence that decodes, and whose window moves on too."""
    bench = Bench(name, spec_of(SMALL[name], 2, window=window), 4, seed=5)
    bench.allocate([40, 60], consecutive=False)
    bench.step([(1, 11)])
    for chunk in chunks:
        bench.check([(0, chunk), (1, 1)])


# Layers of other shapes in the same memory.

NEIGHBOURS = [
    (spec_of(4, 4), spec_of(8, 2, window=10)),  # two heads beside one
    (spec_of(4, 3), spec_of(6, 2)),  # no common part but 1
    (spec_of(8, 2), spec_of(4, 2, head_size=32)),
    (spec_of(16, 1, window=9), spec_of(4, 4, window=30)),
    (spec_of(4, 2, "bfloat16", head_size=32), spec_of(16, 1, "bfloat16", window=7)),
]
NEIGHBOURS_OF_16 = [
    (spec_of(16, 4), spec_of(32, 2, window=10)),
    (spec_of(32, 3), spec_of(48, 2)),
    (spec_of(16, 2, "float16", head_size=32), spec_of(64, 1, "float16", window=7)),
]
HALF_NEIGHBOURS = [(spec_of(16, 4, "float16"), spec_of(32, 2, "float16"))]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    matrix(
        {"triton": NEIGHBOURS_OF_16, "flash_attn": HALF_NEIGHBOURS, "torch_sdpa": NEIGHBOURS, "cpu_attn": NEIGHBOURS},
        NEIGHBOURS_OF_16[:1],
    ),
)
def test_shapes_that_share_memory_leave_each_others_blocks_alone(
    name: str, one: KVCacheSpec, other: KVCacheSpec
) -> None:
    """The even blocks are the one's, the odd ones the other's."""
    benches = [Bench(name, one, 12, [other]), Bench(name, other, 12, [one], seed=1)]
    pool = benches[0].tensor(*benches[0].backend.kv_cache_shape(61))
    for bench, ids in zip(benches, (np.arange(2, 61, 2), np.arange(1, 61, 2)), strict=True):
        bench.cache = pool.view(bench.backend.kv_cache_shape(61))
        bench.place(bench.order.permutation(ids), [bench.num_blocks(n) for n in (40, 30)])
    decodes = 1 if benches[0].is_interpreted else 9
    for parts in ([(0, 7)], [(1, 20), (0, 1)], [(0, 12), (1, 1)], *[[(1, 1), (0, 1)]] * decodes, [(0, 11)]):
        for bench in benches:
            bench.check(parts)


# The choice of a backend, and what each refuses.


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_runs_on_its_own_device_alone(name: str) -> None:
    for device in {"cpu", "cuda", "meta"} - {RUNS_ON[name]}:
        spec = MLASpec(16, 16, 8, "float16") if name.endswith("_mla") else spec_of(16, 1, "float16")
        reason = BACKENDS[name].refusal(spec, [layer_of(1)], torch.device(device))
        assert reason is not None
        assert reason.endswith(f"not on {device}")


@pytest.mark.skipif("triton" not in NAMES, reason="triton is not installed")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(16, 1, head_size=264), "16 to 256 numbers, not 264"),
        (spec_of(16, 1, head_size=8), "16 to 256 numbers, not 8"),
        (spec_of(16, 1, head_size=68), "a multiple of 8 .* not 68"),
        (spec_of(8, 1), "a multiple of 16 tokens, not 8"),
        (spec_of(24, 1, window=5), "a multiple of 16 tokens, not 24"),
        (spec_of(16, 1, "int8"), "no dtype int8"),
    ],
)
def test_what_triton_refuses(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_backend("triton", spec, [layer_of(1)], torch.device("cuda"))


def test_on_a_gpu_auto_takes_triton() -> None:
    if "triton" not in NAMES:
        pytest.skip("triton is not installed")
    assert choose_backend("auto", spec_of(16, 1), [layer_of(4)], torch.device("cuda")).name == "triton"


def test_flash_attn_is_refused_where_it_cannot_be_imported() -> None:
    if "flash_attn" in NAMES:
        pytest.skip("a flash-attn package is installed")
    with pytest.raises(ConfigError, match=r"flash_attn_interface cannot be imported.*, flash_attn cannot be imported"):
        choose_backend("flash_attn", spec_of(256, 1, "float16", head_size=64), [layer_of(4)], torch.device("cuda"))


def test_auto_takes_a_backend_that_does_not_refuse() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    assert choose_backend("auto", spec, [layer_of(4)], CPU).name == OF_A_CPU


def test_every_refusal_is_reported() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    with pytest.raises(ConfigError, match="torch_sdpa: it runs on a CPU, not on meta"):
        choose_backend("auto", spec, [layer_of(4)], torch.device("meta"))
    with pytest.raises(ConfigError, match="no such backend") as unknown:
        choose_backend("flash", spec, [layer_of(4)], CPU)
    assert unknown.value.details == {"option": "attention_backend", "value": "flash"}
    with pytest.raises(ConfigError, match="3 query heads are no multiple of 2 KV heads"):
        choose_backend("torch_sdpa", spec, [layer_of(3)], CPU)
