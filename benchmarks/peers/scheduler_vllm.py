"""vLLM's own v1 Scheduler, as its EngineCore calls it, on outputs that no model made.

With one step in flight the class is Scheduler; with two it is AsyncScheduler, its default on a GPU.
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

from benchmarks.peers.scheduler_loops import TOKEN_ID, Load, Outcome, SchedulerChild, run
from benchmarks.peers.vllm_parts import PACKAGES, block_hasher, kv_cache_config, vllm_config, vllm_request


class VllmScheduler(SchedulerChild):
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self, model: str) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.structured_output import StructuredOutputManager

        self._output_class, self._request_class = ModelRunnerOutput, Request
        self._manager_class = StructuredOutputManager
        self._model = model
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def start(self, load: Load) -> None:
        config = vllm_config(
            self._model,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=load.max_model_len,
            block_size=load.block_size,
            num_blocks=load.num_blocks + 1,
            asynchronous=load.steps_in_flight > 1,
        )
        self._scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache_config(load.num_blocks + 1, load.block_size),
            structured_output_manager=self._manager_class(config),
            block_size=load.block_size,
            log_stats=False,
        )
        self._hasher = block_hasher(load.block_size, config.cache_config.prefix_caching_hash_algo)
        self._num_preemptions = 0

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        return vllm_request(request_id, prompt, max_tokens)

    def add(self, request: Any) -> None:
        self._scheduler.add_request(self._request_class.from_engine_core_request(request, self._hasher))

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def send(self, step: Any) -> int:
        return len(pickle.dumps(("execute_model", (step,), {}, 0), protocol=pickle.HIGHEST_PROTOCOL))

    def execute(self, step: Any) -> bytes:
        self._num_preemptions += len(step.preempted_req_ids or ())
        ids = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = [[] if self._scheduler.requests[id_].is_prefill_chunk else [TOKEN_ID] for id_ in ids]
        output = self._output_class(ids, {id_: i for i, id_ in enumerate(ids)}, sampled)
        return pickle.dumps((0, output), protocol=pickle.HIGHEST_PROTOCOL)

    def take(self, reply: bytes) -> Any:
        return pickle.loads(reply)[1]  # noqa: S301 - of `execute`

    def update(self, step: Any, reply: Any) -> Any:
        return self._scheduler.update_from_output(step, reply)

    def deliver(self, outputs: Any) -> Outcome:
        num_tokens, finished = 0, []
        for client in outputs.values():
            for output in self._decoder.decode(self._encoder.encode(client)).outputs:
                num_tokens += len(output.new_token_ids)
                if output.finish_reason is not None:
                    finished.append(output.request_id)
        return Outcome(num_tokens, finished)

    def counts(self) -> dict[str, int]:
        return {"running": len(self._scheduler.running), "preemptions": self._num_preemptions}


if __name__ == "__main__":
    run(VllmScheduler())
