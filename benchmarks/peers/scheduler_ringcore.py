"""ringcore's own Scheduler and KVCacheManager, as its EngineCore calls them, on outputs that no model made."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.scheduler_loops import TOKEN_ID, VOCAB_SIZE, Load, Outcome, SchedulerChild, run
from ringcore.config import SchedulerConfig
from ringcore.executor.wire import pack_step
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol import EngineCoreRequest
from ringcore.protocol.codec import decoder, encoder, int_array
from ringcore.protocol.messages import EngineMessage
from ringcore.protocol.output_reader import OutputReader
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.scheduler.scheduler import Scheduler
from ringcore.testing.fake_rows import FakeRows

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="float32")


class RingcoreScheduler(SchedulerChild):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "msgspec", "numpy")

    def load(self, model: str) -> None:
        self._encoder = encoder()
        self._reply_decoder, self._message_decoder = decoder(ModelRunnerOutput), decoder(EngineMessage)

    def start(self, load: Load) -> None:
        config = SchedulerConfig(
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            steps_in_flight=load.steps_in_flight,
        )
        cache = KVCacheConfig(
            num_blocks=load.num_blocks + 1,
            groups=[KVCacheGroup(["layer"], SPEC)],
            max_model_len=load.max_model_len,
            max_tokens_in_flight=config.max_tokens_in_flight,
        )
        kv_cache = KVCacheManager(cache, max_num_seqs=load.max_num_seqs)
        self._scheduler = Scheduler(config, kv_cache=kv_cache, eos_token_ids=[], vocab_size=VOCAB_SIZE, seed=0)
        self._rows = FakeRows(load.max_num_seqs, load.max_num_batched_tokens, cache)
        self._reader = OutputReader()

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return EngineCoreRequest(request_id, np.array(prompt, np.int32).tobytes(), greedy, arrival_s=0.0)

    def add(self, request: Any) -> None:
        self._scheduler.add_request(request)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def send(self, step: Any) -> int:
        return sum(map(len, pack_step(step.step, self._encoder.encode(step))))

    def execute(self, step: Any) -> bytes:
        rows, num_scheduled_tokens, _ = self._rows.apply(step)  # it checks, too, that a worker could do the step
        samples = self._rows.advance(rows, num_scheduled_tokens)
        sampled = rows[samples]
        self._rows.append_tokens(sampled, step.num_steps)
        token_ids = np.full(len(sampled), TOKEN_ID, np.int32)
        reply = ModelRunnerOutput(step.step, None if samples.all() else int_array(sampled), token_ids)
        return self._encoder.encode(reply)

    def take(self, reply: bytes) -> Any:
        return self._reply_decoder.decode(reply)

    def update(self, step: Any, reply: Any) -> Any:
        return self._scheduler.update(step, reply)

    def deliver(self, outputs: Any) -> Outcome:
        read = self._reader.read(self._message_decoder.decode(self._encoder.encode(outputs)))
        return Outcome(
            sum(len(output.new_token_ids) for output in read),
            [output.request_id for output in read if output.finish_reason is not None],
        )

    def counts(self) -> dict[str, int]:
        stats = self._scheduler.stats()
        return {"running": stats.num_running, "preemptions": stats.num_preemptions}


if __name__ == "__main__":
    run(RingcoreScheduler())
