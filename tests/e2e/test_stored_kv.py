"""Blocks that left the prefix cache come back from host memory or a directory: the tokens of an engine without either,
with two steps in flight, chunks, preemption, several KV cache groups, on one rank and two, and after new weights and
broken files."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine import generate, make_core, tokens
from transformers_models import VOCABULARY, saved

from ringcore import EngineCore, SamplingParams
from ringcore.errors import CapacityError, ConfigError
from ringcore.worker.kv_store import block_files

pytestmark = pytest.mark.timeout(300)

BLOCK_SIZE, NUM_BLOCKS = 4, 40
BLOCK_BYTES = BLOCK_SIZE * 4 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head size, float32
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "executor": "uniproc",
    "max_model_len": 128,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 3,
}
SMALL = {"num_blocks_override": NUM_BLOCKS, "host_kv_cache_bytes": 1 << 22}


def files_in(path: Path) -> dict[str, Any]:
    """A directory behind memory for three of the seven prompts."""
    return {"host_kv_cache_dir": str(path), "host_kv_cache_bytes": 64 * BLOCK_BYTES, "host_kv_cache_dir_bytes": 1 << 22}


NEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# Seven of 60 to 90 tokens: each takes half of the cache, so all leave it before they are asked again.
PROMPTS = [[3 + (7 * i + 11 * j + j * j) % 300 for j in range(60 + 5 * i)] for i in range(7)]
LONGER = [[*prompt, *(5 + i for _ in range(9))] for i, prompt in enumerate(PROMPTS)]  # the next turns


@pytest.fixture(scope="module")
def expected(tiny_qwen2: str) -> list[list[int]]:
    with make_core(tiny_qwen2, **OPTIONS, enable_prefix_caching=False) as core:
        return tokens(generate(core, PROMPTS + LONGER, NEW))


def one_by_one(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens(generate(core, [prompt], NEW))[0] for prompt in prompts]


def until_written(core: EngineCore) -> None:
    core._executor._worker._kv_store._files._writers.submit(lambda: None).result(60)  # type: ignore[attr-defined]


def stats(core: EngineCore) -> Any:
    found = core.step_metrics().stored_kv
    assert found is not None
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_are_found_in_host_memory(tiny_qwen2: str, expected: list[list[int]], depth: int) -> None:
    options = OPTIONS | SMALL | {"steps_in_flight": depth, "long_prefill_token_threshold": 24}
    with make_core(tiny_qwen2, **options) as core:
        assert one_by_one(core, PROMPTS + LONGER) == expected
        found = stats(core)
        num_found = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
        assert found.num_hit_tokens >= num_found * 0.9
        assert found.loaded_bytes == found.num_hit_tokens // BLOCK_SIZE * BLOCK_BYTES
        assert found.saved_bytes > found.loaded_bytes
        assert found.load_s > 0
        assert not found.num_failed_blocks
        assert core.stats().num_prefix_hit_tokens >= found.num_hit_tokens


def test_a_crowd_with_preemption(tiny_qwen2: str, expected: list[list[int]]) -> None:
    with make_core(tiny_qwen2, **OPTIONS | SMALL) as core:
        long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        first = tokens(generate(core, PROMPTS, long))
        assert [one[:6] for one in first] == expected[: len(PROMPTS)]
        again = tokens(generate(core, PROMPTS + LONGER, NEW))
        assert again == expected
        assert core.stats().num_preemptions
        assert stats(core).num_hit_tokens


@pytest.mark.long_form
def test_two_ranks(tiny_qwen2: str, expected: list[list[int]], tmp_path: Path) -> None:
    """In a directory, where one rank has lost a file: then no rank has the block."""
    two = {"executor": "multiproc", "tensor_parallel_size": 2, **files_in(tmp_path)}
    with make_core(tiny_qwen2, **OPTIONS | SMALL | two) as core:
        assert one_by_one(core, PROMPTS + LONGER[:3]) == expected[: len(PROMPTS) + 3]
        found = stats(core)
        assert found.loaded_bytes >= found.num_hit_tokens // BLOCK_SIZE * BLOCK_BYTES > 20 * BLOCK_BYTES
        assert found.levels.memory_loaded_bytes + found.levels.directory_loaded_bytes >= found.loaded_bytes  # of both
        for file in tmp_path.rglob("*1-of-2/*.kv"):
            file.unlink()
        assert one_by_one(core, LONGER[3:5]) == expected[len(PROMPTS) + 3 : len(PROMPTS) + 5]
        assert stats(core).num_failed_blocks > found.num_failed_blocks


def test_groups_with_windows(tiny_qwen2: str, tmp_path: Path) -> None:
    """Two full layers, two that see 12 tokens: a hit in both, of which the one needs its last blocks alone."""
    folder = tmp_path / "sliding"
    folder.mkdir()
    for file in Path(tiny_qwen2).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention"] * 2
    (folder / "config.json").unlink()
    changed = config | {"use_sliding_window": True, "sliding_window": 12, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(changed))
    with make_core(str(folder), **OPTIONS, enable_prefix_caching=False) as core:
        expected = tokens(generate(core, PROMPTS + LONGER, NEW))
    with make_core(str(folder), **OPTIONS | SMALL | {"num_blocks_override": 66}) as core:
        assert one_by_one(core, PROMPTS + LONGER) == expected
        assert stats(core).num_hit_tokens > 200


@pytest.mark.long_form
def test_latents(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path).path
    prompts = [[token % VOCABULARY for token in prompt] for prompt in PROMPTS[:4] + LONGER[:4]]
    with make_core(model, **OPTIONS, enable_prefix_caching=False) as core:
        expected = tokens(generate(core, prompts, NEW))
    with make_core(model, **OPTIONS, **SMALL) as core:
        assert one_by_one(core, prompts) == expected
        assert stats(core).num_hit_tokens


def _damage(file: Path, other: bytes, how: str) -> None:
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes({"a bit": contents, "the end": contents[:-1], "another's": other}[how])


def test_a_later_engine_finds_the_directory(tiny_qwen2: str, expected: list[list[int]], tmp_path: Path) -> None:
    options = OPTIONS | SMALL | files_in(tmp_path)
    with make_core(tiny_qwen2, **options) as core:
        for prompt, written in zip(PROMPTS, expected, strict=False):
            assert one_by_one(core, [prompt]) == [written]
            until_written(core)
        num_stored = stats(core).num_blocks
    assert num_stored * 0.9 < len(list(tmp_path.rglob("*.kv"))) <= num_stored
    assert not list(tmp_path.rglob("*.tmp"))
    with make_core(tiny_qwen2, **options) as core:
        assert one_by_one(core, LONGER[:2]) == expected[len(PROMPTS) : len(PROMPTS) + 2]
        assert stats(core).num_hit_tokens >= 100
    with make_core(tiny_qwen2, **options | {"dtype": "bfloat16"}) as core:
        assert not stats(core).num_blocks  # none is of another dtype


@pytest.mark.parametrize("how", ["a bit", "another's", "the end"])
def test_a_broken_file_is_a_miss(tiny_qwen2: str, expected: list[list[int]], tmp_path: Path, how: str) -> None:
    with make_core(tiny_qwen2, **OPTIONS | SMALL | files_in(tmp_path)) as core:
        one_by_one(core, PROMPTS)
        until_written(core)
        files = list(tmp_path.rglob("*.kv"))
        contents = [file.read_bytes() for file in files]
        for file, other in zip(files, contents[1:] + contents[:1], strict=True):
            _damage(file, other, how)
        assert one_by_one(core, LONGER[:2]) == expected[len(PROMPTS) : len(PROMPTS) + 2]
        found = stats(core)
        assert found.num_failed_blocks >= 20
        assert found.num_hit_tokens == found.loaded_bytes == 0


def test_it_is_emptied_with_the_prefix_cache_and_by_new_weights(
    tiny_qwen2: str, expected: list[list[int]], tmp_path: Path
) -> None:
    options = OPTIONS | SMALL | {"enable_sleep_mode": True}
    with make_core(tiny_qwen2, **options) as core:
        one_by_one(core, PROMPTS[:4])
        core.sleep(1)
        core.wake_up()
        assert one_by_one(core, LONGER[:1]) == expected[len(PROMPTS) : len(PROMPTS) + 1]
        num_hits = stats(core).num_hit_tokens
        assert num_hits  # sleep keeps what is in host memory
        core.reload_weights(tiny_qwen2)
        assert not stats(core).num_blocks
        assert one_by_one(core, LONGER[1:2]) == expected[len(PROMPTS) + 1 : len(PROMPTS) + 2]
        assert stats(core).num_hit_tokens == num_hits
        one_by_one(core, PROMPTS[:4])
        assert stats(core).num_blocks
        assert core.reset_prefix_cache()
        assert not stats(core).num_blocks
    files = options | files_in(tmp_path)
    with make_core(tiny_qwen2, **files) as core:
        one_by_one(core, PROMPTS[:4])
        core.reload_weights(tiny_qwen2)
        one_by_one(core, PROMPTS[:4])
        assert not stats(core).num_blocks
    assert list(tmp_path.rglob("*.kv"))  # of the old weights, for those that have them


def test_memory_in_front_of_a_directory(tiny_qwen2: str, expected: list[list[int]], tmp_path: Path) -> None:
    """What was asked last is found in memory, the rest in files; the tokens are those of a run without either."""
    with make_core(tiny_qwen2, **OPTIONS | SMALL | files_in(tmp_path)) as core:
        for prompt, written in zip(PROMPTS + LONGER, expected, strict=True):
            assert one_by_one(core, [prompt]) == [written]
            until_written(core)
        found = stats(core)
        assert found.num_hit_tokens > 400
        assert found.loaded_bytes == found.num_hit_tokens // BLOCK_SIZE * BLOCK_BYTES
        levels = found.levels
        assert levels.memory_loaded_bytes + levels.directory_loaded_bytes == found.loaded_bytes
        assert levels.directory_loaded_bytes > 0
        assert one_by_one(core, LONGER[4:5]) == expected[len(PROMPTS) + 4 : len(PROMPTS) + 5]  # it left lately
        assert stats(core).levels.memory_loaded_bytes > levels.memory_loaded_bytes
        assert not stats(core).levels.num_broken_files + stats(core).levels.num_lost_directories


def test_a_directory_that_hangs(
    tiny_qwen2: str, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, sleep and the end go on without it, and no token is another one."""
    options = OPTIONS | SMALL | files_in(tmp_path)
    with make_core(tiny_qwen2, **options) as core:
        one_by_one(core, PROMPTS)
    goes_on = threading.Event()
    monkeypatch.setattr(block_files, "read_block", lambda *args: goes_on.wait(200) and "missing")
    began = time.monotonic()
    with make_core(tiny_qwen2, **options, host_kv_cache_dir_timeout_s=0.5, enable_sleep_mode=True) as core:
        assert one_by_one(core, LONGER[:2]) == expected[len(PROMPTS) : len(PROMPTS) + 2]
        found = stats(core)
        assert found.levels.num_lost_directories == 1
        assert found.num_failed_blocks
        assert not found.num_hit_tokens
        core.sleep(1)
        core.wake_up()
        assert one_by_one(core, PROMPTS) == expected[: len(PROMPTS)]
        assert one_by_one(core, LONGER) == expected[len(PROMPTS) :]
    assert time.monotonic() - began < 100  # a read would hang for 200 s
    goes_on.set()


def test_options(tiny_qwen2: str, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="host_kv_cache_bytes=100: one block"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_bytes=100)
    with pytest.raises(CapacityError, match="lower host_kv_cache_bytes"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_bytes=1 << 50)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_bytes=1 << 20, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="existing directory"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_bytes=1 << 20, host_kv_cache_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="give host_kv_cache_bytes too"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="give host_kv_cache_dir too"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_bytes=1 << 20, host_kv_cache_dir_bytes=1 << 20)
    with pytest.raises(ConfigError, match="host_kv_cache_dir_timeout_s"):
        make_core(tiny_qwen2, **OPTIONS, host_kv_cache_dir_timeout_s=0)
    files = {"host_kv_cache_bytes": 1 << 20, "host_kv_cache_dir": str(tmp_path)}
    with pytest.raises(CapacityError, match="host_kv_cache_dir_bytes=100: one block"):
        make_core(tiny_qwen2, **OPTIONS, **files, host_kv_cache_dir_bytes=100)
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        return  # root
    with pytest.raises(ConfigError, match=r"cannot be used: Permission denied"):
        make_core(tiny_qwen2, **OPTIONS, **files)
