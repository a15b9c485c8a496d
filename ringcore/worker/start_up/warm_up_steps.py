"""Dummy steps that launch every kernel of a model's steps: the sizes on which the choice of a kernel depends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ringcore.config import EngineConfig
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_parameters import EVERY_PARAMETER
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.worker.runner.graph_capture import graph_sizes

__all__ = ["warm_up_steps"]

_PROMPTS = (2, 16, 100, 1000)  # tokens: kernels depend on the length; Triton specializes on multiples of 16
_LONG_PROMPT = 2048  # from which on some backends have kernels of their own (`attention.backends.fused_prompts`)
_PREFIX = 16
_MANY_ROWS = 8  # from which on prefixes that rows share are looked for (`kernels.attention.shared_prefixes`)
_GREEDY, _SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
_ADJUSTED = SamplingParams(temperature=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, allowed_token_ids=[0])


def warm_up_steps(config: EngineConfig, block_sizes: Sequence[int]) -> Iterator[SchedulerOutput]:
    """Dummy steps: prompts of several lengths, one after a cached prefix, some in mixed steps with decoding rows; then
    decoding steps of every graph size, and a long prompt. block_sizes: by KV cache group. All tokens are in block 1."""

    def prompt(row: int, num_tokens: int, params: SamplingParams, num_computed: int = 0) -> NewRequest:
        blocks = [int_array([1] * -(-(num_tokens + 1) // size)) for size in block_sizes]  # room for the next token too
        ids = int_array([0] * num_tokens)
        return NewRequest(row, ids, num_tokens, num_computed, num_computed, blocks, params, 1, [0])

    longest = min(config.model.context_len - 1, config.scheduler.token_budget)
    if longest < 1:
        return
    max_rows, steps = config.scheduler.max_num_seqs, _Steps()
    for num_tokens, params in product(_PROMPTS, (_GREEDY, _SAMPLED, EVERY_PARAMETER)):
        if num_tokens <= longest:
            yield steps.fresh([prompt(0, num_tokens, params)], [num_tokens])
    if longest >= 2 * _PREFIX:
        yield steps.fresh([prompt(0, 2 * _PREFIX, _SAMPLED, _PREFIX)], [_PREFIX])
        if max_rows > 1:
            yield steps.step([prompt(1, _PREFIX, _SAMPLED)], [0, 1], [1, _PREFIX])
        if max_rows > _MANY_ROWS:
            yield steps.fresh([prompt(row, 1, _SAMPLED) for row in range(_MANY_ROWS)], None)
            new, lens = prompt(_MANY_ROWS, _PREFIX, _SAMPLED), [1] * _MANY_ROWS + [_PREFIX]
            yield steps.step([new], range(_MANY_ROWS + 1), lens)
    yield steps.fresh([prompt(0, 1, _ADJUSTED)], None)
    smallest, *others = graph_sizes(max_rows)[:longest]
    sizes = [*reversed(others), smallest]
    yield steps.fresh([prompt(row, 1, _SAMPLED) for row in range(sizes[0])], None)
    for size in sizes[1:]:
        yield steps.step([], range(size), None)
    if longest >= _LONG_PROMPT:
        yield steps.fresh([prompt(0, _LONG_PROMPT, _GREEDY)], [_LONG_PROMPT])


class _Steps:
    """Builds numbered steps, and tracks the rows in use."""

    def __init__(self) -> None:
        self._number = 0
        self._taken: list[int] = []

    def fresh(self, new: list[NewRequest], num_tokens: list[int] | None) -> SchedulerOutput:
        """A step of new requests only; all earlier ones have finished."""
        finished, self._taken = self._taken, []
        return self.step(new, [request.row for request in new], num_tokens, finished)

    def step(
        self, new: list[NewRequest], rows: Sequence[int], num_tokens: list[int] | None, finished: Sequence[int] = ()
    ) -> SchedulerOutput:
        """num_tokens: of each row; None: one each."""
        self._taken += [request.row for request in new]
        self._number += 1
        return SchedulerOutput(
            step=self._number - 1,
            num_steps=1,
            finished_rows=int_array(finished),
            new_requests=new,
            new_blocks=[],
            rows=int_array(rows),
            num_scheduled_tokens=None if num_tokens is None else int_array(num_tokens),
            num_tokens=len(rows) if num_tokens is None else sum(num_tokens),
        )
