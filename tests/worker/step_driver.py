"""Drives one worker by hand-made steps: what a scheduler would send, without its rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from ringcore.config import EngineConfig
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput, NewBlocks, NewRequest, SchedulerOutput
from ringcore.worker.rpc import call_rpc
from ringcore.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, max_tokens=None)


def make_config(model: str, **options: Any) -> EngineConfig:
    given = {"dtype": "float32", "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    return EngineConfig.from_options(model=model, **given | options)


def plan(worker: Worker, num_blocks: int) -> KVCacheConfig:
    """A group of the layers of each spec."""
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in worker.get_kv_cache_spec().items():
        layers.setdefault(spec, []).append(name)
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=[KVCacheGroup(names, spec) for spec, names in layers.items()],
        max_model_len=worker.config.model.context_len,
        max_tokens_in_flight=worker.config.scheduler.max_tokens_in_flight,
    )


def cache_of(*specs: KVCacheSpec, max_model_len: int) -> KVCacheConfig:
    """A group of one layer for each spec."""
    groups = [KVCacheGroup([f"layers.{i}.attention"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=40, groups=groups, max_model_len=max_model_len, max_tokens_in_flight=64)


def start(worker: Worker, num_blocks: int = 40, rank: int | None = None) -> Worker:
    """rank: another one, as which it runs steps with the whole model and without a group: only 0 returns an output."""
    worker.init_device()
    worker.load_model()
    worker.rank = worker.rank if rank is None else rank
    worker.initialize_from_config(plan(worker, num_blocks))
    return worker


def admit(
    row: int,
    tokens: Sequence[int],
    *blocks: Sequence[int],
    computed: int = 0,
    cached: int | None = None,
    params: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> NewRequest:
    """`blocks`: by KV cache group; `cached`: None for as many as are computed."""
    return NewRequest(
        row=row,
        token_ids=int_array(tokens),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=computed,
        num_cached_tokens=computed if cached is None else cached,
        block_ids=[int_array(ids) for ids in blocks],
        sampling_params=params,
        seed=params.seed or 0,
        stop_token_ids=list(stop_token_ids),
        bad_words_token_ids=[list(word) for word in bad_words],
    )


def make_step(
    scheduled: dict[int, int],
    *,
    new: Sequence[NewRequest] = (),
    finished: Sequence[int] = (),
    blocks: Sequence[tuple[int, ...]] = (),
    number: int = 0,
    num_steps: int = 1,
) -> SchedulerOutput:
    """`scheduled`: tokens by row; `blocks`: (row, block id in each KV cache group) to append, 0 for none."""
    num_groups = len(blocks[0]) - 1 if blocks else 0
    return SchedulerOutput(
        step=number,
        num_steps=num_steps,
        finished_rows=int_array(finished),
        new_requests=list(new),
        new_blocks=[_new_blocks([(row, ids[group]) for row, *ids in blocks]) for group in range(num_groups)],
        rows=int_array(list(scheduled)),
        num_scheduled_tokens=int_array(list(scheduled.values())),
        num_tokens=sum(scheduled.values()) + (num_steps - 1) * len(scheduled),
    )


def _new_blocks(pairs: Sequence[tuple[int, int]]) -> NewBlocks:
    there = [(row, block) for row, block in pairs if block]
    return NewBlocks(int_array([row for row, _ in there]), int_array([block for _, block in there]))


def execute(worker: Worker, step: SchedulerOutput) -> ModelRunnerOutput | None:
    """Waits for the step."""
    return worker.execute_model(step).result()


def run(worker: Worker, scheduled: dict[int, int], **delta: Any) -> ModelRunnerOutput:
    """The step's output, with the rows written out where they are all of the step's."""
    output = execute(worker, make_step(scheduled, **delta))
    assert output is not None
    return output if output.rows is not None else msgspec.structs.replace(output, rows=int_array(list(scheduled)))


def sampled(output: ModelRunnerOutput) -> dict[int, int]:
    """The token of each row that sampled, in one step."""
    assert output.rows is not None
    return dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))


def decode(worker: Worker, rows: Sequence[int], count: int) -> dict[int, list[int]]:
    """`count` steps of one token of each row, whose blocks must be there."""
    written: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(count):
        for row, token in sampled(run(worker, dict.fromkeys(rows, 1))).items():
            written[row].append(token)
    return written


def break_embedding(monkeypatch: pytest.MonkeyPatch, worker: Worker, token: int) -> None:
    """The embedding of `token` is NaN from now on."""
    model: Any = worker._runner.paged.model  # type: ignore[union-attr]
    embed = model.embed_tokens

    def with_a_hole(input_ids: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        hidden: torch.Tensor = embed(input_ids, *options, **named)
        hidden[input_ids == token] = math.nan
        return hidden

    monkeypatch.setattr(model, "embed_tokens", with_a_hole)


def engine_call(worker: Worker, method: str, args: Sequence[Any] = ()) -> Any:
    """A call by name as the engine makes it."""
    return call_rpc(worker, method, args, by_engine=True)
