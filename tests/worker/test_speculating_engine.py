"""Engines with and without speculative decoding write the same: greedy and sampled, with one step in flight and two, on
two ranks, and where blocks are short."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runner import rows_on_device
from fake_graphs import head_graphs_on_cpu
from tiny_heads import constant_head, write_head
from tiny_mtp import MtpReference

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import ConfigError, UnknownOptionError
from ringcore.metrics.draft_log import DraftLog, DraftStats
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.worker.drafts.drafts_behind import DraftsBehind
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.runner import draft_costs

OPTIONS = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SUFFIX = {"method": "suffix", "num_drafts": 5, "min_match": 1}
FREE = SUFFIX | {"method": "scripted_drafts:FreeSuffix"}
FREE_HEAD = "scripted_drafts:FreeHead"
SHORT: dict[str, Any] = {"steps_in_flight": 2, "num_blocks_override": 18, "max_model_len": 44}  # rows are preempted
REPEATED = [5, 17, 80, 3, 44, 9, 61] * 3
PROMPTS = [REPEATED, REPEATED[:16], [11, 60, 23, 11, 60, 23], [7, 7, 7, 7, 7], REPEATED[2:], [90, 12, 33]]


def params(index: int, max_tokens: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {5: 60.0}},  # writes it alone: its drafts are right
        {"temperature": 0.8, "seed": 3, "logit_bias": {5: 6.0, 17: 6.0}, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 12},
        {"temperature": 1.0, "seed": 9, "top_p": 0.9, "stop_token_ids": [44, 45, 46]},
        {"temperature": 0, "bad_words": ["a b"]},
    ]
    return SamplingParams(**{"max_tokens": max_tokens, **kinds[index]})


def write(core: EngineCore, salt: str, num_requests: int = len(PROMPTS), max_tokens: int = 40) -> list[list[int]]:
    written: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS[:num_requests]):
        request_id = f"{salt}-{index}"
        written[request_id] = []
        core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=params(index, max_tokens),
                arrival_s=time.monotonic(),
                cache_salt=salt,
                bad_words_token_ids=[[60, 23]] if index == 5 else [],
            )
        )
    while core.has_unfinished:
        for output in core.step().outputs:
            assert output.error is None
            written[output.request_id] += output.new_token_ids
            if output.request_id.endswith("-2"):
                assert output.logprobs is not None
                assert [one.token_ids[0] for one in output.logprobs] == output.new_token_ids
    return [*written.values()]


def engine(folder: str, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig.from_options(model=folder, **OPTIONS | {"num_blocks_override": 60} | options))


@pytest.fixture(scope="module")
def plain(tiny_llama: tuple[str, Any]) -> Iterator[list[list[int]]]:
    core = engine(tiny_llama[0], executor="uniproc")
    yield write(core, "plain")
    core.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "uniproc"},
        {
            "executor": "uniproc",
            "steps_in_flight": 2,
            "num_blocks_override": 24,
            "max_model_len": 64,
        },  # rows are preempted
        pytest.param({"executor": "multiproc", "tensor_parallel_size": 2, "steps_in_flight": 2}, id="two ranks"),
    ],
)
def test_an_engine_with_drafts_writes_the_same(
    tiny_llama: tuple[str, Any], plain: list[list[int]], options: dict[str, Any]
) -> None:
    core = engine(tiny_llama[0], speculative=SUFFIX, **options)
    try:
        assert write(core, "first") == plain
        assert write(core, "first") == plain  # by what the first wrote
        check(core, "num_blocks_override" in options)
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "uniproc"},
        {"executor": "uniproc", "steps_in_flight": 2, "num_blocks_override": 24, "max_model_len": 64},  # preempted
        pytest.param(
            {"executor": "multiproc", "tensor_parallel_size": 2, "steps_in_flight": 2},
            id="two ranks",
            marks=pytest.mark.long_form,
        ),
    ],
)
def test_an_engine_with_a_head_writes_the_same(
    tiny_llama: tuple[str, Any], plain: list[list[int]], tmp_path: Path, options: dict[str, Any]
) -> None:
    """It drafts what one of the requests writes, and the others do not."""
    head = write_head(tmp_path, constant_head(5))
    core = engine(tiny_llama[0], speculative={"method": FREE_HEAD, "model": head}, **options)
    try:
        assert write(core, "first") == plain
        assert write(core, "first") == plain  # with cached prefixes
        check(core, "num_blocks_override" in options)
    finally:
        core.shutdown()


def test_a_head_sleeps_with_the_model(tiny_llama: tuple[str, Any], plain: list[list[int]], tmp_path: Path) -> None:
    head = write_head(tmp_path, constant_head(5))
    options = {"executor": "uniproc", "enable_sleep_mode": True}
    core = engine(tiny_llama[0], speculative={"method": FREE_HEAD, "model": head}, **options)
    own: Any = core._executor._worker._runner.paged.model.draft_head  # type: ignore[attr-defined]
    with torch.inference_mode():
        features = own.features(torch.ones_like(own.tapped[:1]))
    try:
        core.sleep(1)
        core.wake_up()
        assert write(core, "first") == plain
        core.sleep(2)
        core.wake_up()
        core.reload_weights(tiny_llama[0])
        with torch.inference_mode():
            assert torch.equal(own.features(torch.ones_like(own.tapped[:1])), features)
        assert write(core, "first") == plain
        check(core, is_short=False)
    finally:
        core.shutdown()


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_an_engine_with_mtp_layers_of_transformers_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """While rows are preempted, and after it has slept; the layer's cache is one more of the model's."""
    folder = MtpReference(model_type).save(tmp_path / model_type)
    options: dict[str, Any] = {"executor": "uniproc", "max_model_len": 64, "enable_sleep_mode": True}
    core = engine(folder, **options)
    due = write(core, "first")
    core.shutdown()
    learn = HeadProposer.learn_costs
    monkeypatch.setattr(HeadProposer, "learn_costs", lambda self, costs: learn(self, StepCosts((1, 2), (1.0, 1.0))))
    monkeypatch.setattr(HeadProposer, "_is_worthwhile", lambda self: True)
    speculative = {"method": "mtp", "num_drafts": 3}
    core = engine(folder, speculative=speculative, steps_in_flight=2, num_blocks_override=30, **options)
    try:
        assert write(core, "first") == due
        core.sleep(1)
        core.wake_up()
        assert write(core, "second") == due
        drafts = core.step_metrics().drafts
        assert drafts is not None
        assert drafts.num_draft_tokens > 20
        assert core.stats().num_preemptions > 0
    finally:
        core.shutdown()


def test_the_runner_of_a_gpu_with_drafts_writes_the_same(
    tiny_llama: tuple[str, Any], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By interpreted kernels, two steps in flight."""
    rows_on_device(monkeypatch, plans_on_device=True)
    monkeypatch.setattr(draft_costs, "COST_SIZES", (1, 2))
    core = engine(tiny_llama[0], executor="uniproc", speculative=FREE, **SHORT)
    try:
        assert write(core, "first", 4, max_tokens=16) == [one[:16] for one in plain[:4]]
        check(core, is_short=True)
    finally:
        core.shutdown()


def test_the_runner_of_a_gpu_with_a_head_by_graphs_writes_the_same(
    tiny_llama: tuple[str, Any], plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise; most drafts are computed behind the step before, and some end where a row's blocks do."""
    rows_on_device(monkeypatch, plans_on_device=True)
    head_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(draft_costs, "COST_SIZES", (1, 2, 17))
    used: list[np.ndarray] = []
    num_drafts = DraftsBehind.num_drafts
    monkeypatch.setattr(DraftsBehind, "num_drafts", lambda *given: used.append(num_drafts(*given)) or used[-1])
    speculative = {"method": FREE_HEAD, "model": write_head(tmp_path, constant_head(5))}
    core = engine(tiny_llama[0], executor="uniproc", speculative=speculative, **SHORT)
    try:
        assert write(core, "first", 4, max_tokens=16) == [one[:16] for one in plain[:4]]
        check(core, is_short=True, least=8)
        assert len(used) > 5
    finally:
        core.shutdown()


def check(core: EngineCore, is_short: bool, least: int = 20) -> None:
    assert core.stats().num_free_blocks >= core.ready.num_blocks - 1
    assert (core.stats().num_preemptions > 0) == is_short
    drafts, seen = core.step_metrics().drafts, core.engine_call("snapshot")()
    assert drafts is not None
    assert drafts.num_draft_tokens >= drafts.num_drafts > 0
    assert drafts.num_accepted_tokens >= least
    assert (seen.num_draft_tokens, seen.num_accepted_tokens) == (drafts.num_draft_tokens, drafts.num_accepted_tokens)


def test_drafts_are_counted_by_their_place() -> None:
    log = DraftLog(3)
    log.count(ModelRunnerOutput(1, None, int_array([1, 2])))
    gained, drafts = int_array([3, 1, 1, 4]), int_array([3, 2, 0, 3])
    log.count(ModelRunnerOutput(2, None, int_array(np.zeros(9)), num_gained=gained, num_drafts=drafts))
    assert log.stats() == DraftStats(3, 8, [2, 2, 1])
    assert DraftLog(0).stats() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "suffix"}, "give an object as"),
        ({"speculative": {"num_drafts": 3}}, "give an object as"),
        ({"speculative": {"method": "eagle"}}, r"speculative.method='eagle': give one of suffix"),
        ({"speculative": SUFFIX | {"num_drafts": 0}}, r"speculative.num_drafts=0: give an integer from 1 to 64"),
        ({"speculative": SUFFIX | {"min_match": True}}, r"speculative.min_match=True"),
        ({"speculative": SUFFIX | {"shared_tokens": -1}}, r"speculative.shared_tokens=-1"),
        ({"speculative": SUFFIX, "pipeline_parallel_size": 2}, "give pipeline_parallel_size=1"),
    ],
)
def test_what_cannot_be_served_is_refused(tiny_llama: tuple[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(model=tiny_llama[0], **OPTIONS | options)


def test_a_gpu_serves_it_by_a_backend_that_plans_on_the_device(
    tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_options(model=tiny_llama[0], device="cuda", speculative=SUFFIX)
    assert config.scheduler.max_steps_in_flight == 2
    rows_on_device(monkeypatch, plans_on_device=False)
    with pytest.raises(ConfigError, match=r"speculative=.* plans its steps on the host.*attention_backend='triton'"):
        engine(tiny_llama[0], executor="uniproc", speculative=SUFFIX)


def test_an_unknown_field_names_the_nearest(tiny_llama: tuple[str, Any]) -> None:
    with pytest.raises(UnknownOptionError, match="num_drafts"):
        EngineConfig.from_options(model=tiny_llama[0], speculative={"method": "suffix", "num_draft": 3})
