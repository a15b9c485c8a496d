"""The least time that a workload can take on a device, by what it must read and multiply."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_ceilings import Ceilings
from benchmarks.models import PublishedModel
from benchmarks.peers.gpu_loops import SHARED_TOKENS, offline_lengths, shared_lengths
from benchmarks.result import Limit

__all__ = ["decode_floor", "offline_floor", "prefill_ceiling", "shared_floor"]


class _Device:
    """`size` equal devices, each with its share of a model's weights and KV heads."""

    def __init__(self, ceilings: Ceilings, size: int) -> None:
        self._ceilings, self._size = ceilings, size

    def read_s(self, num_bytes: float) -> float:
        return num_bytes / self._size / self._ceilings.read_bytes_per_s

    def multiply_s(self, flops: float) -> float:
        return flops / self._size / self._ceilings.gemm_flops_per_s

    @property
    def shown(self) -> str:
        on = f" on {self._size} devices" if self._size > 1 else ""
        return f"at {self._ceilings.read_bytes_per_s / 1e12:.2f} TB/s{on}"

    @property
    def shown_rate(self) -> str:
        on = f" on {self._size} devices" if self._size > 1 else ""
        return f"at {self._ceilings.gemm_flops_per_s / 1e12:.0f} TFLOP/s{on}"


def decode_floor(
    model: PublishedModel, ceilings: Ceilings, size: int, bytes_a_number: int, batch: int, context: float
) -> Limit:
    """Milliseconds a step: all weights that are multiplied and the cache of `batch` sequences of `context` tokens, read
    once; or, where that takes longer, the products."""
    device = _Device(ceilings, size)
    kv_bytes = batch * model.kv_numbers(context) * bytes_a_number
    num_bytes = model.step_bytes(batch, bytes_a_number) + kv_bytes
    read_s, multiply_s = device.read_s(num_bytes), device.multiply_s(2.0 * model.step_weights * batch)
    if multiply_s > read_s:
        return Limit(value=multiply_s * 1e3, statement=f"the products of {batch} tokens {device.shown_rate}")
    statement = f"reading {num_bytes / 1e9:.2f} GB of weights and KV cache {device.shown}"
    return Limit(value=read_s * 1e3, statement=statement)


def offline_floor(
    model: PublishedModel, ceilings: Ceilings, size: int, bytes_a_number: int, num_requests: int
) -> Limit:
    """Seconds for nano-vllm's workload: the cache that all decode steps read, the weights once for each step of the
    longest completion (of experts, those that its tokens are routed to), and the products of the prompts; nothing
    overlaps."""
    return _batch_floor(model, _Device(ceilings, size), bytes_a_number, offline_lengths(num_requests))


def shared_floor(model: PublishedModel, ceilings: Ceilings, size: int, bytes_a_number: int, num_requests: int) -> Limit:
    """As `offline_floor`, of requests with a common prefix, which is computed once and read once in each step."""
    device = _Device(ceilings, size)
    return _batch_floor(model, device, bytes_a_number, shared_lengths(num_requests), SHARED_TOKENS)


def _batch_floor(
    model: PublishedModel,
    device: _Device,
    bytes_a_number: int,
    lengths: Sequence[tuple[int, int]],
    shared: int = 0,
) -> Limit:
    """lengths: of each request its prompt tokens, after `shared` ones, and its new tokens."""
    num_steps = max(new for _, new in lengths)
    cached = sum(model.kv_numbers_of_steps(prompt, new) for prompt, new in lengths)
    cached += num_steps * model.kv_numbers(shared)
    decoding = (sum(new > step for _, new in lengths) for step in range(num_steps))
    kv_s = device.read_s(cached * bytes_a_number)
    weights_s = device.read_s(sum(model.step_bytes(num_tokens, bytes_a_number) for num_tokens in decoding))
    flops = sum(_prompt_flops(model, shared + prompt) - _prompt_flops(model, shared) for prompt, _ in lengths)
    prompts_s = device.multiply_s(flops + _prompt_flops(model, shared))
    statement = (
        f"{kv_s:.2f} s to read the KV cache and {weights_s:.2f} s the weights, {num_steps:,} times, {device.shown}, "
        f"{prompts_s:.2f} s for the products of the prompts {device.shown_rate}, without overlap"
    )
    return Limit(value=kv_s + weights_s + prompts_s, statement=statement)


def prefill_ceiling(
    model: PublishedModel, ceilings: Ceilings, size: int, num_prompts: int, prompt_tokens: int
) -> Limit:
    """Tokens a second."""
    device = _Device(ceilings, size)
    flops = num_prompts * _prompt_flops(model, prompt_tokens)
    seconds = device.multiply_s(flops)
    statement = f"{flops / 1e12:,.0f} TFLOP, those of attention among them, {device.shown_rate}"
    return Limit(value=num_prompts * prompt_tokens / seconds, statement=statement)


def _prompt_flops(model: PublishedModel, num_tokens: int) -> float:
    """The output matrix is left out: it is for the last token alone."""
    return 2.0 * model.layer_weights * num_tokens + model.attention_flops(num_tokens)
