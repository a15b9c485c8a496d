"""An LLM that sleeps and gets new weights: what it generates, what it and its processes have, and what it should be."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from reference import Entry, differences, load

from ringcore import LLM, RequestOutput, SamplingParams

OPTIONS = {"dtype": "float32", "max_model_len": 512, "kv_cache_bytes": 1 << 26, "enable_sleep_mode": True}
AWAKE = {"weights": "resident", "kv_cache": "resident"}

# Short prompts, each step of which the reference decided clearly.
_LENGTHS = (5, 17, 33)
ENTRIES = [entry for entry in load("smollm2-135m-lengths") if len(entry.prompt_token_ids) in _LENGTHS]
assert [entry.num_decisive for entry in ENTRIES] == [24] * len(_LENGTHS)
PROMPTS = [entry.prompt_token_ids for entry in ENTRIES]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(num_tokens: int, entries: list[Entry] = ENTRIES) -> list[list[int]]:
    return [entry.token_ids[:num_tokens] for entry in entries]


def check_tokens(llm: LLM, num_tokens: int = 6) -> list[RequestOutput]:
    """Those of the reference, by the checkpoint's weights."""
    outputs = llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)
    assert token_ids(outputs) == expected(num_tokens)
    return outputs


def check_all_lengths(llm: LLM) -> None:
    """As `check_tokens`, of prompts up to 300 tokens."""
    entries = [entry for entry in load("smollm2-135m-lengths") if len(entry.prompt_token_ids) <= 300][::5]
    outputs = llm.generate([entry.prompt_token_ids for entry in entries], greedy(24), use_tqdm=False)
    assert differences(entries, token_ids(outputs)) == []


@contextmanager
def generating(llm: LLM, num_tokens: int = 24):
    """The reference's prompts are under way: some tokens are there, and no prompt is finished. Yields a list that has
    the outputs once the block is left."""
    outputs: list[RequestOutput] = []
    first_step = llm.health().step
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)), daemon=True
    )
    thread.start()
    wait_until(lambda: llm.health().step >= first_step + 3 and llm.health().num_running == len(PROMPTS))
    yield outputs
    thread.join(90)
    assert not thread.is_alive(), "the requests do not come to an end"


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.005)


def resident_bytes(llm: LLM) -> int:
    """Of the first worker."""
    return llm.collective_rpc("stats", unique_reply_rank=0, timeout=90)["resident_bytes"]


def weights_bytes(llm: LLM) -> int:
    return llm.ready.memory_bytes[0]["weights_bytes"]


def holdings(llm: LLM) -> dict[str, tuple[int, int]]:
    """Of the engine and each worker: resident bytes, and open descriptors."""
    return {
        name: (psutil.Process(pid).memory_info().rss, len(os.listdir(f"/proc/{pid}/fd")))
        for name, pid in llm.ready.pids.items()
    }


def check_no_growth(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], max_bytes: int) -> None:
    for name, (num_bytes, num_descriptors) in after.items():
        assert num_descriptors <= before[name][1], name
        assert num_bytes <= before[name][0] + max_bytes, name


def is_empty(folder: Path) -> bool:
    return not os.listdir(folder)


def unnamed_bytes(pid: int, folder: Path) -> int:
    """The length of the files without a name in `folder` that a process has open."""
    total = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(file).startswith(str(folder)):
                total += file.stat().st_size
    return total
