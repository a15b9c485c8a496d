"""An executor for vLLM without a worker: every request that is scheduled gets a token at once.

In a module of its own, for the engine's process finds it by name.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.peers.vllm_parts import full_attention_spec

__all__ = ["NullExecutor"]

TOKEN_ID = 7
MEMORY_BYTES = 1 << 40


class NullExecutor(Executor):
    """Prompts must be computed whole: each request that is scheduled samples."""

    def _init_executor(self) -> None:
        self._answers: dict[str, Any] = {
            "get_kv_cache_spec": {"layer": full_attention_spec(self.cache_config.block_size)},
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": MEMORY_BYTES,
            "get_supported_tasks": ("generate",),
        }

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        return [self._answers.get(method)]

    def compile_or_warm_up_model(self) -> None: ...

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """None: as on a GPU, the tokens come with `sample_tokens`, which is called after each step that has any."""
        ids = list(scheduler_output.num_scheduled_tokens)
        self._output = ModelRunnerOutput(ids, {id_: i for i, id_ in enumerate(ids)}, [[TOKEN_ID] for _ in ids])
        output = None if ids else self._output
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._output) if non_block else self._output

    def check_health(self) -> None: ...


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
