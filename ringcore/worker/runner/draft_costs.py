"""What a step costs with drafts in it: measured at start-up, on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.proposer import Proposer
from ringcore.worker.drafts.step_costs import COST_SIZES, StepCosts
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.runner.step_launcher import StepLauncher, StepStages

__all__ = ["HostSteps", "fastest", "measure_costs"]

_ROUNDS = 4  # the first one warms up; of the others the fastest counts


@torch.inference_mode()
def measure_costs(
    launcher: StepLauncher, proposer: Proposer, most_tokens: int, device: torch.device, tp: TensorParallel
) -> StepCosts | None:
    """The same on every rank: those of the slowest. None where the KV cache has no room for steps of several tokens.

    It leaves tokens in the first blocks, which their next owner overwrites."""
    sizes = [size for size in COST_SIZES if size <= most_tokens]
    if len(sizes) < 2:
        return None
    seconds, waited_s = launcher.time_steps(sizes)
    num_timed = [proposer.time_drafts(size) for size in sizes]
    timed = [(size, num) for size, num in zip(sizes, num_timed, strict=True) if num]
    of_drafts = [fastest(partial(proposer.time_drafts, size)) / num for size, num in timed]
    numbers = torch.tensor([waited_s, *seconds, *of_drafts], dtype=torch.float32, device=device)
    gathered = tp.all_gather_last_dim(numbers).cpu().numpy().reshape(-1, len(numbers)).max(axis=0)
    seconds, of_drafts = gathered[1 : 1 + len(sizes)].tolist(), gathered[1 + len(sizes) :].tolist()
    return StepCosts(sizes, seconds, float(gathered[0]), of_drafts or None)


def fastest(run: Callable[[], object]) -> float:
    """Seconds."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


class HostSteps:
    """Steps of one row that are gathered on the host."""

    def __init__(self, stages: StepStages, plan: KVCacheConfig) -> None:
        self._stages, self._plan = stages, plan

    def seconds(self, num_tokens: int) -> float:
        stages = self._stages
        stages.rows.admit(_request(self._plan, num_tokens))

        def run() -> None:
            batch = InputBatch.gather(stages.rows, int_array([0]), int_array([num_tokens]), stages.device)
            stages.paged.model.compute_logits(stages.paged.forward_batch(batch.input_ids, batch))

        taken = fastest(run)
        stages.rows.clear()
        return taken


def _request(plan: KVCacheConfig, num_tokens: int) -> NewRequest:
    """In the first blocks of the cache, other ones in each group."""
    blocks, first = [], 1
    for group in plan.groups:
        num_blocks = -(-num_tokens // group.spec.block_size)
        blocks.append(int_array(range(first, first + num_blocks)))
        first += num_blocks
    return NewRequest(0, int_array([0] * num_tokens), num_tokens, 0, 0, blocks, SamplingParams(), 0, [])
