"""The endpoints of a service; each delegates to its own module."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from ringcore.front_end.serving_engine import ServingEngine
from ringcore.openai_api.answers import (
    ChatCompletionResponse,
    CompletionResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    TextResponse,
    TokensResponse,
)
from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ringcore.serve.browser_gate import BrowserGate
from ringcore.serve.chat_page import add_chat_page
from ringcore.serve.embeddings import add_embeddings
from ringcore.serve.errors import Described, add_error_handlers, described, json_response
from ringcore.serve.generation import generate
from ringcore.serve.limits import Gate
from ringcore.serve.messages import add_messages
from ringcore.serve.methods import Methods
from ringcore.serve.monitoring import add_monitoring
from ringcore.serve.options import ServiceOptions
from ringcore.serve.otlp import TraceContext
from ringcore.serve.page_calls import add_page_calls
from ringcore.serve.responses import add_responses
from ringcore.serve.service import Service
from ringcore.serve.streaming import while_connected
from ringcore.serve.tokens import detokenize, tokenize
from ringcore.version import __version__

__all__ = ["create_app"]


def create_app(engine: ServingEngine, options: ServiceOptions | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, which must be started; the caller closes it."""
    options = options or ServiceOptions()
    service = Service(engine, options)
    # Without FastAPI's own documentation pages, which load scripts from a CDN.
    errors: Described = {"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}}
    app = FastAPI(title="ringcore", version=__version__, docs_url=None, redoc_url=None, responses=errors)
    app.state.service = service
    _add_middleware(app, options)
    if engine.has_request_spans:
        app.add_middleware(TraceContext)
    add_error_handlers(app)
    _add_generation(app, service)
    add_responses(app, service)
    add_messages(app, service)
    add_embeddings(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    add_monitoring(app, service)
    if options.admin_api_keys:
        from ringcore.serve.admin.endpoints import add_admin

        add_admin(app, service)
    if options.batch_dir is not None:
        from ringcore.serve.batches.endpoints import add_batches

        app.state.batches = add_batches(app, service, options.batch_dir)
    add_chat_page(app)
    add_page_calls(app, service)
    return app


def _add_middleware(app: FastAPI, options: ServiceOptions) -> None:
    """A request passes them from the last to the first. The CORS middleware answers preflights, which have no key,
    before the `Gate`."""
    app.add_middleware(Gate, options=options)
    app.add_middleware(Methods)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(BrowserGate, options=options)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=described(CompletionResponse, "text/event-stream"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_started()
        return await generate(service, Completions(service.model, body), body.stream, request.receive)

    @app.post("/v1/chat/completions", responses=described(ChatCompletionResponse, "text/event-stream"))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        service.check_started()
        return await generate(service, Chat(service.model, body), body.stream, request.receive)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=described(TokensResponse))
    async def tokenize_(body: TokenizeRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, tokenize(service, body)))

    @app.post("/detokenize", responses=described(TextResponse))
    async def detokenize_(body: DetokenizeRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, detokenize(service, body)))


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=service.started_at,
            owned_by="ringcore",
            root=service.engine.config.model.model,
            parent=None,
            max_model_len=service.model.max_model_len,
        )

    @app.get("/v1/models", responses=described(ModelList))
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}", responses=described(ModelCard))
    async def model(name: str) -> Response:
        return json_response(card(service.model.name(name)))
