"""The bodies of OpenAI's batch lines, by the endpoint that a line names: how each is read, answered and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel

from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.embeddings.embeddings import Embeddings
from ringcore.openai_api.embeddings.schema import EmbeddingsRequest
from ringcore.openai_api.responses.responses import Responses
from ringcore.openai_api.responses.schema import ResponsesRequest
from ringcore.openai_api.responses.store import ResponseStore
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest
from ringcore.openai_api.served_model import ServedModel

__all__ = ["BODIES", "BodyKind"]


class Asked(Protocol):
    async def whole(self) -> Any: ...


class BodyKind(NamedTuple):
    """asked: makes what answers a validated body, of the model, the body, a name that is the line's alone, and the seed
    of a body that brings none. counts: the names of prompt and completion tokens in the answer's usage."""

    schema: type[BaseModel]
    asked: Callable[[ServedModel, Any, str, int], Asked]
    counts: tuple[str, str] = ("prompt_tokens", "completion_tokens")

    def num_tokens(self, usage: Mapping[str, Any]) -> tuple[int, int]:
        """Of the prompt and of the completion, which an embedding has not."""
        prompt, completion = self.counts
        return usage[prompt], usage.get(completion, 0)


def _completions(model: ServedModel, body: CompletionRequest, name: str, seed: int) -> Completions:
    body.seed = seed if body.seed is None else body.seed
    return Completions(model, body, f"cmpl-{name}")


def _chat(model: ServedModel, body: ChatCompletionRequest, name: str, seed: int) -> Chat:
    body.seed = seed if body.seed is None else body.seed
    return Chat(model, body, f"chatcmpl-{name}")


def _responses(model: ServedModel, body: ResponsesRequest, name: str, seed: int) -> Responses:
    """No line goes on with the response of another one: lines are answered in any order."""
    return Responses(model, body, ResponseStore(max_responses=0, max_bytes=0), f"resp_{name}", seed)


def _embeddings(model: ServedModel, body: EmbeddingsRequest, name: str, seed: int) -> Embeddings:
    return Embeddings(model, body)


BODIES: Mapping[str, BodyKind] = {
    "/v1/completions": BodyKind(CompletionRequest, _completions),
    "/v1/chat/completions": BodyKind(ChatCompletionRequest, _chat),
    "/v1/responses": BodyKind(ResponsesRequest, _responses, ("input_tokens", "output_tokens")),
    "/v1/embeddings": BodyKind(EmbeddingsRequest, _embeddings),
}
