"""Drives one worker by hand-made steps: what a scheduler would send, without its rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringcore.config import EngineConfig
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheGroup
from ringcore.protocol import ModelRunnerOutput, NewRequest, SchedulerOutput, int_array
from ringcore.sampling_params import SamplingParams
from ringcore.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, max_tokens=None)


def make_config(model: str, **options: Any) -> EngineConfig:
    given = {"dtype": "float32", "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    return EngineConfig.from_options(model=model, **given | options)


def plan(worker: Worker, num_blocks: int) -> KVCacheConfig:
    specs = worker.get_kv_cache_spec()
    return KVCacheConfig(num_blocks=num_blocks, groups=[KVCacheGroup(list(specs), next(iter(specs.values())))])


def start(worker: Worker, num_blocks: int = 40) -> Worker:
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config(plan(worker, num_blocks))
    return worker


def admit(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    computed: int = 0,
    params: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
) -> NewRequest:
    return NewRequest(
        row=row,
        token_ids=int_array(tokens),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=computed,
        block_ids=int_array(blocks),
        sampling_params=params,
        seed=params.seed or 0,
        stop_token_ids=list(stop_token_ids),
    )


def make_step(
    scheduled: dict[int, int],
    *,
    new: Sequence[NewRequest] = (),
    finished: Sequence[int] = (),
    blocks: Sequence[tuple[int, int]] = (),
    number: int = 0,
) -> SchedulerOutput:
    """`scheduled`: tokens by row; `blocks`: (row, block id) to append."""
    return SchedulerOutput(
        step=number,
        finished_rows=int_array(finished),
        new_requests=list(new),
        new_block_rows=int_array([row for row, _ in blocks]),
        new_block_ids=int_array([block for _, block in blocks]),
        rows=int_array(list(scheduled)),
        num_scheduled_tokens=int_array(list(scheduled.values())),
    )


def run(worker: Worker, scheduled: dict[int, int], **delta: Any) -> ModelRunnerOutput:
    output = worker.execute_model(make_step(scheduled, **delta))
    assert output is not None
    return output


def sampled(output: ModelRunnerOutput) -> dict[int, int]:
    return dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))


def decode(worker: Worker, rows: Sequence[int], count: int) -> dict[int, list[int]]:
    """`count` steps of one token of each row, whose blocks must be there."""
    written: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(count):
        for row, token in sampled(run(worker, dict.fromkeys(rows, 1))).items():
            written[row].append(token)
    return written
