"""Engines with fake executors, small enough to follow by hand."""

from __future__ import annotations

from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing import FakeExecutor, VirtualClock


def make_config(folder, **options) -> EngineConfig:
    """Blocks of 4 tokens, one step in flight, requests of 64 tokens at most."""
    defaults = {"block_size": 4, "max_model_len": 64, "steps_in_flight": 1, "max_num_seqs": 8}
    return EngineConfig.from_options(model=folder, load_format="dummy", **defaults | options)


def make_core(config: EngineConfig, **executor) -> EngineCore:
    """In virtual time; `core.clock` moves it, `core.executor` is behind it."""
    clock = VirtualClock()
    fake = FakeExecutor(config, clock=clock, **executor)
    core = EngineCore(config, fake, clock=clock.now)
    core.clock, core.executor = clock, fake
    return core


def add(core: EngineCore, name: str, prompt: list[int], **params) -> None:
    params = {"max_tokens": 4, "ignore_eos": True, "seed": 1} | params
    core.add_request(EngineCoreRequest(name, prompt, SamplingParams(**params), arrival_s=core.clock.now()))


def drain(core: EngineCore) -> dict[str, tuple[list[int], str, str | None]]:
    """Steps until nothing is left: tokens, finish reason and type of the error of each request."""
    tokens: dict[str, list[int]] = {}
    ends = {}
    for _ in range(10_000):
        if not core.has_unfinished:
            return {name: (tokens[name], *ends[name]) for name in tokens}
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason, output.error.type if output.error else None
    raise AssertionError("it does not come to an end")
