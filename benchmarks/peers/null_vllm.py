"""vLLM's EngineCore behind its own client, with an executor that has no worker.

Steps are scheduled one ahead (async scheduling), its default on a GPU.
"""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

from benchmarks.peers.null_loops import BLOCK_SIZE, Engine, Load, NullChild, run
from benchmarks.peers.vllm_parts import PACKAGES, vllm_config, vllm_request


class VllmEngine:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._ids = count()

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        for prompt in prompts:
            self._client.add_request(vllm_request(f"request-{next(self._ids)}", prompt, max_tokens))

    def get(self) -> int:
        return sum(len(output.new_token_ids) for output in self._client.get_output().outputs)

    def close(self) -> None:
        self._client.shutdown()


class VllmNull(NullChild):
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self, model: str) -> None:
        from vllm.v1.engine.core_client import EngineCoreClient

        from benchmarks.peers.vllm_null_executor import NullExecutor

        self._model, self._client_class, self._executor_class = model, EngineCoreClient, NullExecutor

    def start(self, load: Load) -> Engine:
        config = vllm_config(
            self._model,
            max_num_seqs=load.num_requests,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=load.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks_override=load.num_blocks + 1,
            asynchronous=True,
            distributed_executor_backend=self._executor_class,
        )
        client = self._client_class.make_client(
            multiprocess_mode=load.has_process,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=self._executor_class,
            log_stats=False,
        )
        return VllmEngine(client)


if __name__ == "__main__":
    run(VllmNull())
