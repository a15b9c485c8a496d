"""Embeddings, scores and rankings: the answer to one body. A score is the cosine of two embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.front_end.embeddings import embedding_of, pooling_params
from ringcore.openai_api.embeddings.schema import (
    DocumentText,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    PoolingRequest,
    PromptUsage,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from ringcore.openai_api.errors import fields_named
from ringcore.openai_api.served_model import Answer, ServedModel, all_of
from ringcore.params.outputs import RequestOutput

__all__ = ["Embeddings", "Ranking", "Scores"]

Prompt = str | list[int]


class _PooledPrompts:
    """Prompts of one body, each an engine request. Raises `InvalidRequestError` and `ApiError`."""

    n = 1

    def __init__(
        self, model: ServedModel, body: PoolingRequest, prefix: str, prompts: Sequence[Prompt], fields: Sequence[str]
    ) -> None:
        """fields: the client's field of each prompt."""
        model.check_fields(body)
        self._model, self._prompts, self._fields = model, prompts, fields
        self._params = pooling_params(body.pooling)
        self.answer = Answer.of(prefix, model.name(body.model))
        self.num_prompts = len(prompts)
        for prompt, field in zip(prompts, fields, strict=True):
            if not prompt:
                raise InvalidRequestError(f"{field}: it is empty; give at least one character or token", field=field)

    async def embed(self, *, normalize: bool = True) -> list[np.ndarray]:
        """[hidden_size] float32 of each prompt, in their order."""
        found: list[np.ndarray | None] = [None] * len(self._prompts)

        async def embed_one(index: int) -> None:
            async def take(output: RequestOutput) -> None:
                self.answer.count_prompt(output)
                found[index] = embedding_of(output, normalize)

            with fields_named(dict.fromkeys(("prompt", "prompt_token_ids"), self._fields[index])):
                request_id = f"{self.answer.id}-{index}"
                outputs = self._model.engine.generate(self._prompts[index], self._params, request_id=request_id)
                await self._model.consume(outputs, take)

        await all_of([embed_one(index) for index in range(len(self._prompts))])
        return [one for one in found if one is not None]

    def usage(self) -> PromptUsage:
        return PromptUsage(prompt_tokens=self.answer.prompt_tokens, total_tokens=self.answer.prompt_tokens)


class Embeddings(_PooledPrompts):
    """One body of /v1/embeddings."""

    def __init__(self, model: ServedModel, body: EmbeddingsRequest) -> None:
        given = body.input
        prompts: list[Prompt] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else [*given]
        if not prompts:
            raise InvalidRequestError("input: it is empty; give at least one text", field="input")
        super().__init__(model, body, "embd", prompts, ["input"] * len(prompts))
        self._body = body

    async def whole(self) -> EmbeddingsResponse:
        vectors = await self.embed(normalize=self._body.normalize)
        data = [Embedding(object="embedding", index=i, embedding=self._encoded(one)) for i, one in enumerate(vectors)]
        return EmbeddingsResponse(object="list", model=self.answer.model, data=data, usage=self.usage())

    def _encoded(self, vector: np.ndarray) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


class Scores(_PooledPrompts):
    """One body of /v1/score: one text against each of others, or as many pairs."""

    def __init__(self, model: ServedModel, body: ScoreRequest) -> None:
        firsts, seconds = _texts(body.text_1), _texts(body.text_2)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequestError(
                f"text_1: there are {len(firsts)}, and {len(seconds)} of text_2; give one, or as many", field="text_1"
            )
        self._num_firsts = len(firsts)
        fields = ["text_1"] * len(firsts) + ["text_2"] * len(seconds)
        super().__init__(model, body, "score", [*firsts, *seconds], fields)

    async def whole(self) -> ScoreResponse:
        vectors = await self.embed()
        firsts, seconds = np.stack(vectors[: self._num_firsts]), np.stack(vectors[self._num_firsts :])
        scores = (firsts * seconds).sum(-1).tolist()  # one of firsts is repeated
        return ScoreResponse(
            id=self.answer.id,
            object="list",
            created=self.answer.created,
            model=self.answer.model,
            data=[Score(object="score", index=i, score=score) for i, score in enumerate(scores)],
            usage=self.usage(),
        )


class Ranking(_PooledPrompts):
    """One body of /v1/rerank."""

    def __init__(self, model: ServedModel, body: RerankRequest) -> None:
        fields = ["query", *(f"documents[{i}]" for i in range(len(body.documents)))]
        super().__init__(model, body, "rerank", [body.query, *body.documents], fields)
        self._body = body

    async def whole(self) -> RerankResponse:
        query, *documents = await self.embed()
        scores = np.stack(documents) @ query
        best = np.argsort(-scores, kind="stable")[: self._body.top_n].tolist()
        results = [RankedDocument(index=i, relevance_score=float(scores[i])) for i in best]
        if self._body.return_documents:
            for one in results:
                one["document"] = DocumentText(text=self._body.documents[one["index"]])
        return RerankResponse(id=self.answer.id, model=self.answer.model, results=results, usage=self.usage())


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
