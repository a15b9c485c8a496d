"""What a load is put on: a service behind a URL, or an engine of this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ringcore.bench.load import Answer
from ringcore.bench.prompts import BenchRequest
from ringcore.front_end.async_engine import AsyncEngine
from ringcore.http_client import Chunk, HttpFailure, OpenAIClient
from ringcore.params.sampling_params import SamplingParams

__all__ = ["EngineTarget", "HttpTarget"]


@dataclass(frozen=True)
class HttpTarget:
    """is_streamed: whether the answer comes in pieces, each with its time. fields: further fields of each body."""

    client: OpenAIClient
    model: str
    is_streamed: bool = True
    ignore_eos: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    async def complete(self, request: BenchRequest) -> Answer:
        path, body = self._body(request)
        answer = Answer(num_prompt_tokens=request.num_prompt_tokens, is_streamed=self.is_streamed)
        if self.is_streamed:
            async for chunk in self.client.stream(path, body):
                if chunk.text or chunk.reasoning:
                    answer.text_s.append(time.perf_counter())
                _count(chunk, answer)
        else:
            _count(await self.client.ask(path, body), answer)
            answer.text_s.append(time.perf_counter())
        if not answer.text_s:
            raise HttpFailure("no answer", "an answer without text")
        answer.num_output_tokens = answer.num_output_tokens or len(answer.text_s)
        return answer

    def _body(self, request: BenchRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "temperature": 0.0}
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        name = "messages" if request.is_chat else "prompt"
        return "chat/completions" if request.is_chat else "completions", {**body, **self.fields, name: request.prompt}


def _count(chunk: Chunk, answer: Answer) -> None:
    """The service's own count, if it gives one; else every piece of text is a token."""
    if chunk.usage is not None:
        answer.num_prompt_tokens = chunk.usage.prompt_tokens
        answer.num_output_tokens = chunk.usage.completion_tokens


@dataclass(frozen=True)
class EngineTarget:
    """params: all but the length and the kind of outputs."""

    engine: AsyncEngine
    is_streamed: bool = True
    params: Mapping[str, Any] = field(default_factory=dict)

    async def complete(self, request: BenchRequest) -> Answer:
        kind: Literal["delta", "final"] = "delta" if self.is_streamed else "final"
        params = SamplingParams(**{**self.params, "max_tokens": request.max_tokens, "output_kind": kind})
        answer = Answer(is_streamed=self.is_streamed)
        prompt: Any = request.prompt
        outputs = self.engine.chat(prompt, params) if request.is_chat else self.engine.generate(prompt, params)
        async for output in outputs:
            num_new = sum(len(completion.token_ids) for completion in output.outputs)
            if num_new:
                answer.text_s.append(time.perf_counter())
                answer.num_output_tokens += num_new
            answer.num_prompt_tokens = len(output.prompt_token_ids)
        return answer
