"""ringcore's EngineCore behind its own client, with an executor that has no model and no process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

from benchmarks.peers.null_loops import BLOCK_SIZE, Engine, Load, NullChild, run
from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.observers import FrontEndObserver
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol import EngineCoreOutputs, EngineCoreRequest
from ringcore.protocol.messages import EngineReady


class RingcoreEngine:
    """In a process of its own (`client`), or in this one (`core`)."""

    def __init__(self, config: EngineConfig, has_process: bool, observers: Sequence[FrontEndObserver] = ()) -> None:
        """observers: of the client."""
        self._ids = count()
        self._client = EngineCoreClient(config, observers) if has_process else None
        self._core = None if has_process else EngineCore(config)
        if self._client is not None:
            self._client.wait_ready()

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [EngineCoreRequest(f"request-{next(self._ids)}", prompt, greedy, 0.0) for prompt in prompts]
        if self._client is not None:
            self._client.add_requests(requests)
        else:
            for request in requests:
                self._core_here.add_request(request)

    def get(self) -> int:
        return sum(len(output.new_token_ids) for output in self._outputs().outputs)

    def _outputs(self) -> EngineCoreOutputs:
        return self._client.get_outputs() if self._client is not None else self._core_here.step()

    @property
    def ready(self) -> EngineReady:
        return self._client.ready if self._client is not None else self._core_here.ready

    @property
    def _core_here(self) -> EngineCore:
        assert self._core is not None
        return self._core

    @property
    def client(self) -> EngineCoreClient:
        assert self._client is not None
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        else:
            self._core_here.shutdown()


class RingcoreNull(NullChild):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "msgspec", "numpy")

    def load(self, model: str) -> None:
        self._model = model

    def start(self, load: Load) -> Engine:
        return RingcoreEngine(engine_config(self._model, load), load.has_process)


def engine_config(model: str, load: Load) -> EngineConfig:
    options: dict[str, Any] = {"model": model, "load_format": "dummy", "block_size": BLOCK_SIZE}
    options |= {"max_num_seqs": load.num_requests, "max_num_batched_tokens": load.max_num_batched_tokens}
    options |= {"max_model_len": load.max_model_len, "num_blocks_override": load.num_blocks + 1}
    return EngineConfig.from_options(executor="benchmarks.peers.ringcore_null_executor:NullExecutor", **options)


if __name__ == "__main__":
    run(RingcoreNull())
