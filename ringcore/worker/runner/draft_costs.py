"""What a step costs with drafts in it: measured at start-up, on all ranks together."""

from __future__ import annotations

import time

import numpy as np
import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.step_costs import COST_SIZES
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["measure_steps"]

_ROUNDS = 4  # the first one warms up; of the others the fastest counts


@torch.inference_mode()
def measure_steps(
    paged: PagedModel, rows: RequestRows, plan: KVCacheConfig, device: torch.device, tp: TensorParallel
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of one row with so many tokens, each of which has logits -> their sizes and seconds [n], the same on every
    rank: those of the slowest. It leaves tokens in the first blocks, which their next owner overwrites.

    Fewer sizes than two where the KV cache has no room for more."""
    block_size = max(group.spec.block_size for group in plan.groups)
    most = min(plan.max_model_len, (plan.num_blocks // len(plan.groups) - 1) * block_size)
    sizes = np.array([size for size in COST_SIZES if size <= most], dtype=np.int64)
    seconds = np.array([_measure(paged, rows, plan, device, size) for size in sizes.tolist()], dtype=np.float32)
    gathered = tp.all_gather_last_dim(torch.from_numpy(seconds).to(device)).cpu().numpy()
    return sizes, gathered.reshape(-1, len(sizes)).max(axis=0)


def _measure(paged: PagedModel, rows: RequestRows, plan: KVCacheConfig, device: torch.device, size: int) -> float:
    rows.admit(_request(plan, size))
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        batch = InputBatch.gather(rows, int_array([0]), int_array([size]), device)
        logits = paged.model.compute_logits(paged.forward_batch(batch.input_ids, batch))
        logits[-1].argmax().item()  # waits for the device
        taken.append(time.perf_counter() - began)
    rows.clear()
    return min(taken[1:])


def _request(plan: KVCacheConfig, num_tokens: int) -> NewRequest:
    """In the first blocks of the cache, other ones in each group."""
    blocks, first = [], 1
    for group in plan.groups:
        num_blocks = -(-num_tokens // group.spec.block_size)
        blocks.append(int_array(range(first, first + num_blocks)))
        first += num_blocks
    return NewRequest(0, int_array([0] * num_tokens), num_tokens, 0, 0, blocks, SamplingParams(), 0, [])
