"""The engine of a replica of Ray Serve's LLM: `LLMServer(config, engine_cls=RayServeEngine)`. Extra `ray`.

Ray's interface is `LLMEngine` of `ray.llm`, which asks for no base class; `RAY_TESTED` says of which versions. Ray's
modules of requests and answers need vLLM or SGLang beside it, whose models they are; nothing else of those runs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from ringcore.errors import ConfigError, EngineDeadError, RingcoreError
from ringcore.front_end.async_engine import AsyncEngine
from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.errors import ApiError, api_error_of, invalid_body
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ringcore.serve.generation import acquired
from ringcore.serve.options import ServiceOptions
from ringcore.serve.service import Service
from ringcore.serve.tokens import detokenize, tokenize

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["RAY_TESTED", "RayServeEngine"]

RAY_TESTED = ">=2.60,<2.61"
_RAY_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"

Answers = AsyncGenerator[Any, None]
_Body = TypeVar("_Body", bound=BaseModel)


class RayServeEngine:
    """One `AsyncEngine`, with `engine_kwargs` of Ray's `LLMConfig` as its options. It runs its workers as processes of
    the replica's actor, which therefore has the GPUs of all ranks (`ray_actor_options={"num_gpus": ...}`). Ray replaces
    a replica whose `check_health` fails."""

    def __init__(self, llm_config: Any) -> None:
        loading = llm_config.model_loading_config
        source = loading.model_source or loading.model_id
        if not isinstance(source, str):
            raise ConfigError("model_source: give a folder or a hub id; a mirror is not downloaded", option="model")
        self._options: dict[str, Any] = {"model": source, **llm_config.engine_kwargs}
        self._service_options = ServiceOptions(served_model_names=(loading.model_id,))
        self._started: Service | None = None

    async def start(self) -> None:
        """Raises the error of the start."""
        engine = AsyncEngine(**self._options)
        try:
            await engine.start()
            self._started = Service(engine, self._service_options)
        except BaseException:
            await engine.close()
            raise

    @property
    def _service(self) -> Service:
        if self._started is None:
            raise EngineDeadError("the engine was not started; await start() first", process="engine")
        return self._started

    @property
    def _engine(self) -> Any:
        return self._service.engine

    # -----------------------------------------------------------------------------------------------------------
    # Requests: each is a stream of answers; a streamed one of server-sent events, any other of one answer or error.
    # Errors of a request and of the engine are answers; any other is a bug, and is raised for Ray to log.

    async def chat(self, request: Any, raw_request_info: Any = None) -> Answers:
        def asked(body: dict[str, Any], answer_id: str | None) -> Chat:
            return Chat(self._service.model, _validated(ChatCompletionRequest, body), answer_id)

        async with aclosing(self._generated(request, asked, "ChatCompletionResponse")) as answers:
            async for answer in answers:
                yield answer

    async def completions(self, request: Any, raw_request_info: Any = None) -> Answers:
        def asked(body: dict[str, Any], answer_id: str | None) -> Completions:
            return Completions(self._service.model, _validated(CompletionRequest, body), answer_id)

        async with aclosing(self._generated(request, asked, "CompletionResponse")) as answers:
            async for answer in answers:
                yield answer

    async def _generated(
        self, request: BaseModel, asked: Callable[[dict[str, Any], str | None], Chat | Completions], answer: str
    ) -> Answers:
        try:
            body = _body_of(request)
            one = asked(body, body.pop("request_id", None))
            if not body.get("stream"):
                with acquired(self._service, one):
                    yield _ray_model(answer)(**await one.whole())
                return
            async with aclosing(self._events(one)) as events:
                async for event in events:
                    yield event
        except (ApiError, RingcoreError) as error:
            yield _ray_error(error)

    async def _events(self, one: Chat | Completions) -> AsyncGenerator[str, None]:
        """Ends the request where its reader stops."""
        emitted: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)  # back-pressure

        async def emit(value: Any) -> None:
            await emitted.put(f"data: {msgspec.json.encode(value).decode()}\n\n")

        async def run() -> None:
            try:
                with acquired(self._service, one):
                    await one.stream(emit)
            finally:
                await emitted.put(None)

        running = asyncio.ensure_future(run())
        try:
            while (event := await emitted.get()) is not None:
                yield event
            await running
            yield "data: [DONE]\n\n"
        finally:
            running.cancel()
            with suppress(asyncio.QueueEmpty):
                emitted.get_nowait()  # so that its end can be put
            await asyncio.gather(running, return_exceptions=True)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        try:
            asked = _validated(TokenizeRequest, _body_of(request))
            yield _ray_model("TokenizeResponse")(**await tokenize(self._service, asked))
        except (ApiError, RingcoreError) as error:
            yield _ray_error(error)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        try:
            asked = _validated(DetokenizeRequest, _body_of(request))
            yield _ray_model("DetokenizeResponse")(**await detokenize(self._service, asked))
        except (ApiError, RingcoreError) as error:
            yield _ray_error(error)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> Answers:
        yield _not_served("embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> Answers:
        yield _not_served("transcriptions")

    async def score(self, request: Any, raw_request_info: Any = None) -> Answers:
        yield _not_served("scores")

    async def resolve_lora(self, lora_model: Any) -> None:
        raise ConfigError("lora_config: adapters are not served; leave it out", option="lora_config")

    async def build_asgi_app(self) -> FastAPI:
        """Ray's direct streaming: the whole service in the replica."""
        from ringcore.serve.app import create_app

        return create_app(self._engine, self._service_options)

    # -----------------------------------------------------------------------------------------------------------
    # Life and administration.

    def routing_stats(self) -> dict[str, Any]:
        """Nothing beside what Ray's routers count themselves."""
        return {}

    async def check_health(self) -> None:
        """Raises `EngineDeadError` once the engine has died."""
        health = await self._engine.health()
        if health.state == "dead":
            raise EngineDeadError(health.error or "the engine died", process="engine")

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def sleep(self, **kwargs: Any) -> None:
        """kwargs: of `AsyncEngine.sleep`."""
        await self._engine.sleep(**kwargs)

    async def wakeup(self, **kwargs: Any) -> None:
        await self._engine.wake_up(**kwargs)

    async def is_sleeping(self) -> bool:
        return bool(await self._engine.is_sleeping())

    async def pause(self, **kwargs: Any) -> None:
        await self._engine.pause(**kwargs)

    async def resume(self, **kwargs: Any) -> None:
        await self._engine.resume(**kwargs)

    async def is_paused(self) -> bool:
        return (await self._engine.health()).paused is not None

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return list(await self._engine.collective_rpc(method, args, kwargs, timeout=timeout))

    async def shutdown(self) -> None:
        if self._started is not None:
            await self._started.engine.close()


def _body_of(request: BaseModel) -> dict[str, Any]:
    """What the client gave: Ray's models are another library's, with defaults of its own."""
    given = request.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in given.items() if value is not None}


def _validated(schema: type[_Body], body: dict[str, Any]) -> _Body:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error.errors()) from error


def _ray_model(name: str) -> Callable[..., Any]:
    made: Callable[..., Any] = getattr(import_module(_RAY_MODELS), name)
    return made


def _ray_error(error: ApiError | RingcoreError) -> Any:
    known = api_error_of(error)
    info = _ray_model("ErrorInfo")
    return _ray_model("ErrorResponse")(
        error=info(message=known.message, type=known.type, param=known.param, code=int(known.status))
    )


def _not_served(what: str) -> Any:
    return _ray_error(ApiError(HTTPStatus.BAD_REQUEST, f"{what} are not served by this engine"))
