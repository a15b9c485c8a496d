"""POST /v1/embeddings, /v1/score and /v1/rerank, the last two also under vLLM's other paths."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ringcore.openai_api.embeddings.embeddings import Embeddings, Ranking, Scores
from ringcore.openai_api.embeddings.schema import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from ringcore.serve.errors import described
from ringcore.serve.generation import answer
from ringcore.serve.service import Service

__all__ = ["add_embeddings"]


def add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", responses=described(EmbeddingsResponse))
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        service.check_started()
        return await answer(service, Embeddings(service.model, body), request.receive)

    @app.post("/score", include_in_schema=False)
    @app.post("/v1/score", responses=described(ScoreResponse))
    async def score(body: ScoreRequest, request: Request) -> Response:
        service.check_started()
        return await answer(service, Scores(service.model, body), request.receive)

    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v1/rerank", responses=described(RerankResponse))
    async def rerank(body: RerankRequest, request: Request) -> Response:
        service.check_started()
        return await answer(service, Ranking(service.model, body), request.receive)
