"""A model's stages one after the other in this process, each over its own part of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.distributed.parallel import SingleRank, Stage
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["logits_of", "stages_of"]

_CPU, _MAX_LEN, _BLOCK = torch.device("cpu"), 64, 16


def stages_of(model: str, model_impl: str, num_stages: int, gguf_weights: str = "expanded") -> list[Any]:
    """Loaded, as a worker does. model: a folder or a .gguf file."""
    files = find_model(model)
    spec = read_model_spec(files, FAMILIES, model_impl)
    spec = with_gguf_weights(spec, files, gguf_weights, "float32", "cpu", Host())
    models = []
    for index in range(num_stages):
        stage = Stage(index, num_stages)
        built = build_model(spec, SingleRank(), torch.float32, _MAX_LEN, stage=stage)
        with torch.inference_mode(), pending_weights(built.weights(), files, 0, _CPU, None, built.may_ignore) as given:
            built.bind(given)
        models.append(built)
    return models


def logits_of(stages: Sequence[Any], ids: Sequence[int], num_cached: int) -> torch.Tensor:
    """[len(ids), vocab_size]. In two steps, the second after the first num_cached tokens."""
    specs = [
        {layer.name: layer.kv_cache_spec(_BLOCK, "float32") for layer in model.attention_layers} for model in stages
    ]
    plan = plan_kv_cache(
        specs,
        [1 << 24] * len(stages),
        max_model_len=_MAX_LEN,
        fit_max_model_len=False,
        max_tokens_in_flight=_MAX_LEN,
        num_blocks_override=64,
        num_stages=len(stages),
    )
    parts = [_Part(model, plan.of_layers(own.keys()), ids) for model, own in zip(stages, specs, strict=True)]
    found = []
    for num_tokens in (num_cached, len(ids) - num_cached):
        rows = None
        for part in parts:
            rows = part.step(rows, num_tokens)
        with torch.inference_mode():
            found.append(stages[-1].compute_logits(rows).clone())
    return torch.cat(found)


class _Part:
    def __init__(self, model: Any, plan: KVCacheConfig, ids: Sequence[int]) -> None:
        self._paged = PagedModel.allocate(model, "auto", plan, CpuPlatform())
        self._rows = RequestRows(1, plan, 1)
        num_blocks = -(-len(ids) // _BLOCK)
        blocks = [int_array(range(1 + num_blocks * i, 1 + num_blocks * (i + 1))) for i in range(len(plan.groups))]
        request = NewRequest(0, int_array(ids), len(ids), 0, 0, blocks, SamplingParams(), 0, [])
        self._rows.apply(SchedulerOutput(0, 1, int_array(), [request], [], int_array([0]), None, 1))

    def step(self, received: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        counts = int_array([num_tokens])
        batch = InputBatch.gather(self._rows, self._rows.scheduled, counts, _CPU)
        with torch.inference_mode():
            out = self._paged.forward_batch(batch.input_ids if received is None else received, batch)
        self._rows.advance(self._rows.scheduled, counts)
        return out
