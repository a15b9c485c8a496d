"""ringcore's engine in a process of its own behind its client, as `LLM` has it; tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar

from benchmarks.peers.gpu_loops import EngineChild, run


class RingcoreChild(EngineChild):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "torch", "triton", "numpy", "msgspec")

    def __init__(self) -> None:
        self._client: Any = None
        self._report: Any = None  # of the last sleep or wake-up
        self._ids = count()

    def import_library(self) -> None:
        from ringcore import EngineConfig, SamplingParams
        from ringcore.front_end.client_start import start_client
        from ringcore.protocol import EngineCoreRequest

        self._config_class, self._start_client = EngineConfig, start_client
        self._params_class, self._request_class = SamplingParams, EngineCoreRequest

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        self._client = self._start_client(self._config_class.from_options(model=model, **engine_options(settings)))
        self._client.wait_ready()

    def phases(self) -> dict[str, float]:
        seconds: dict[str, float] = self._client.ready.phase_seconds
        return dict(seconds)

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        requests = [
            self._request_class(
                f"request-{next(self._ids)}",
                prompt,
                self._params_class(temperature=temperature, max_tokens=new, ignore_eos=True),
                0.0,
            )
            for prompt, new in zip(prompts, max_tokens, strict=True)
        ]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._client.add_requests(requests)
        num_unfinished = len(requests)
        while num_unfinished:
            for output in self._client.get_outputs().outputs:
                if output.error is not None:
                    raise RuntimeError(f"{output.request_id}: {output.error}")
                tokens[output.request_id] += output.new_token_ids
                num_unfinished -= output.finish_reason is not None
        return list(tokens.values())

    def forget_prefixes(self) -> None:
        if not self._client.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: a request still runs")

    def sleep(self, level: int) -> None:
        self._report = self._client.sleep(level)

    def wake_up(self) -> None:
        self._report = self._client.wake_up()

    def memory_parts(self) -> dict[str, float]:
        """Of the first rank, and the engine's own "seconds" of the whole."""
        return {} if self._report is None else {"seconds": self._report.seconds, **self._report.ranks[0]}

    def num_kv_tokens(self) -> int:
        return int(self._client.ready.num_blocks * self._client.ready.block_size)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def engine_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as `EngineChild.construct` takes them; all else is ringcore's default."""
    same = ("device", "dtype", "max_model_len", "tensor_parallel_size")
    options = {name: settings[name] for name in same}
    where_set = (
        "enable_sleep_mode",
        "model_impl",
        "pipeline_parallel_size",
        "expert_parallel",
        "deterministic",
        "start_from",
    )
    options |= {name: settings[name] for name in where_set if name in settings}
    options |= settings.get("options", {})
    return {**options, "gpu_memory_utilization": settings["memory_share"], "load_format": "dummy"}


if __name__ == "__main__":
    run(RingcoreChild())
