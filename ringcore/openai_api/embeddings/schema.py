"""Request and response bodies of embeddings, scores and rankings."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr
from typing_extensions import TypedDict  # pydantic needs this one, before Python 3.12

from ringcore.openai_api.schema import Strings, TokenIds
from ringcore.params.sampling_params import Pooling

__all__ = [
    "Embedding",
    "EmbeddingsRequest",
    "EmbeddingsResponse",
    "PromptUsage",
    "RankedDocument",
    "RerankRequest",
    "RerankResponse",
    "Score",
    "ScoreRequest",
    "ScoreResponse",
]


class PoolingRequest(BaseModel):
    """The common fields. Others are in `model_extra`, for `ServedModel.check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    pooling: Pooling = "last"
    user: StrictStr | None = None  # no effect


class EmbeddingsRequest(PoolingRequest):
    input: StrictStr | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    normalize: StrictBool = True
    dimensions: None = None  # refused: hidden states have the model's own


class ScoreRequest(PoolingRequest):
    text_1: StrictStr | Annotated[Strings, Field(min_length=1)]
    text_2: StrictStr | Annotated[Strings, Field(min_length=1)]


class RerankRequest(PoolingRequest):
    query: StrictStr
    documents: Annotated[Strings, Field(min_length=1)]
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = True


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingsResponse(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float  # from -1 to 1


class ScoreResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int  # seconds since 1970
    model: str
    data: list[Score]
    usage: PromptUsage


class DocumentText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int  # among the request's documents
    document: NotRequired[DocumentText]
    relevance_score: float


class RerankResponse(TypedDict):
    id: str
    model: str
    results: list[RankedDocument]  # the most relevant first
    usage: PromptUsage
