"""The engine class for Ray Serve's LLM: Ray's interface, and what a server of Ray gets from it, without a cluster."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fake_engine import SLOW, FakeUniproc, make_model_folder
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, ValidationError
from running_service import OPTIONS, text_of

from ringcore.errors import ConfigError
from ringcore.serve.ray_engine import RAY_TESTED, RayServeEngine

INTERNAL = "llm/_internal/serve/core"


def ray_file(path: str) -> ast.Module:
    spec = find_spec("ray")
    assert spec is not None
    return ast.parse((Path(spec.origin).parent / INTERNAL / path).read_text())


def methods_of(tree: ast.Module, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_generator(function) -> bool:
    returns = "" if function.returns is None else ast.unparse(function.returns)
    return "AsyncGenerator" in returns


def test_rays_interface_is_the_one_that_was_tested():
    """Every method that Ray's base class has is here, in the same form, whatever Ray adds."""
    assert version("ray") in SpecifierSet(RAY_TESTED)
    theirs = methods_of(ray_file("engine/protocol.py"), "LLMEngine")
    assert len(theirs) > 15
    for name, function in theirs.items():
        ours = getattr(RayServeEngine, name, None)
        assert ours is not None, f"Ray's LLMEngine has {name}()"
        assert inspect.isasyncgenfunction(ours) == is_generator(function), name
        assert (inspect.iscoroutinefunction(ours) or is_generator(function)) == isinstance(
            function, ast.AsyncFunctionDef
        ), name
        given = [argument.arg for argument in function.args.args]
        assert list(inspect.signature(ours).parameters)[: len(given)] == given, name


def test_rays_server_calls_nothing_else():
    """LLMServer makes the engine of its config alone, and calls methods that are here, but for profiles, which it
    does not need."""
    server = ray_file("server/llm_server.py")
    calls = {
        node.attr
        for node in ast.walk(server)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.engine"
    }
    assert {"start", "check_health"} <= calls
    assert {name for name in calls if not hasattr(RayServeEngine, name)} <= {"start_profile", "stop_profile"}
    assert "self._engine_cls(self._llm_config)" in ast.unparse(server)


def test_rays_models_have_the_names():
    names = {node.name for node in ast.walk(ray_file("configs/openai_api_models.py")) if isinstance(node, ast.ClassDef)}
    assert {"ErrorInfo", "ErrorResponse", "ChatCompletionResponse", "CompletionResponse"} <= names
    assert {"TokenizeResponse", "DetokenizeResponse"} <= names


class AnyModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


class Asked(AnyModel):
    """As vLLM's requests: with a default that nobody gave."""

    stream: bool | None = False
    mm_processor_kwargs: dict | None = None


@pytest.fixture
def models(monkeypatch):
    """In place of Ray's module, which imports vLLM."""
    module = ModuleType("ray_models")
    for name in ("ChatCompletionResponse", "CompletionResponse", "TokenizeResponse", "DetokenizeResponse"):
        setattr(module, name, type(name, (AnyModel,), {}))
    module.ErrorInfo, module.ErrorResponse = ErrorInfo, ErrorResponse
    monkeypatch.setitem(sys.modules, "ray.llm._internal.serve.core.configs.openai_api_models", module)
    return module


def config(folder: str, source: object = None) -> SimpleNamespace:
    loading = SimpleNamespace(model_id="fake", model_source=folder if source is None else source)
    return SimpleNamespace(model_loading_config=loading, engine_kwargs=OPTIONS | {"executor": FakeUniproc})


async def all_of(answers) -> list:
    return [answer async for answer in answers]


def test_what_a_server_gets(models, tmp_path):
    async def scenario():
        engine = RayServeEngine(config(make_model_folder(tmp_path)))
        await engine.start()
        try:
            await check_requests(engine, models)
            assert await engine.collective_rpc("echo", args=("x",)) == ["0:x"]
            await engine.pause()
            assert await engine.is_paused()
            await engine.resume()
            await engine.sleep(level=1)
            assert await engine.is_sleeping()
            (asleep,) = await all_of(engine.completions(Asked(prompt="ab")))
            assert asleep.error.code == 503
            await engine.wakeup()
            await engine.reset_prefix_cache()
            await engine.check_health()
            assert {"/v1/chat/completions", "/health"} <= {one.path for one in (await engine.build_asgi_app()).routes}
        finally:
            await engine.shutdown()
        with pytest.raises(Exception, match="closed"):
            await engine.check_health()

    asyncio.run(scenario())


async def check_requests(engine, models):
    (whole,) = await all_of(engine.completions(Asked(model="fake", prompt="ab", max_tokens=4, request_id="mine")))
    assert isinstance(whole, models.CompletionResponse)
    assert (whole.id, whole.choices[0]["text"]) == ("mine", text_of("ab", 4))
    *events, done = await all_of(engine.completions(Asked(prompt="ab", max_tokens=4, stream=True)))
    assert done == "data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(one["choices"][0]["text"] for one in chunks) == text_of("ab", 4)
    (chat,) = await all_of(engine.chat(Asked(messages=[{"role": "user", "content": "a"}], max_tokens=3)))
    assert chat.choices[0]["message"]["content"] == text_of("user:a;A:", 3)
    (tokens,) = await all_of(engine.tokenize(Asked(prompt="ab")))
    assert tokens.tokens == [97, 98]
    (text,) = await all_of(engine.detokenize(Asked(tokens=[97, 98])))
    assert text.prompt == "ab"

    wrong = [Asked(prompt="ab", max_tokens=-1), Asked(prompt="ab", suffix="x"), Asked(prompt="ab", model="other")]
    errors = [(await all_of(engine.completions(one)))[0].error for one in wrong]
    assert [one.code for one in errors] == [400, 400, 404]
    assert errors[1].param == "suffix"
    (refused,) = await all_of(engine.embeddings(Asked(input="a")))
    assert "embeddings are not served" in refused.error.message

    leaving = engine.completions(Asked(prompt=[97, SLOW], max_tokens=100, stream=True))
    await anext(leaving)
    assert engine._engine.num_unfinished == 1
    await leaving.aclose()
    assert engine._engine.num_unfinished == engine._service.concurrency.num_in_flight == 0


@pytest.mark.parametrize("call", ["completions", "tokenize"])
def test_a_bug_is_raised_for_ray_to_log(models, tmp_path, call):
    """Also where Ray's own model of an answer refuses it: that is no error of the request."""

    class Narrow(BaseModel):
        model_config = ConfigDict(extra="forbid")

    models.CompletionResponse = models.TokenizeResponse = Narrow

    async def scenario():
        engine = RayServeEngine(config(make_model_folder(tmp_path)))
        await engine.start()
        try:
            with pytest.raises(ValidationError, match="Narrow"):
                await all_of(getattr(engine, call)(Asked(prompt="ab")))
            assert engine._service.concurrency.num_in_flight == 0
        finally:
            await engine.shutdown()

    asyncio.run(scenario())


def test_a_mirror_is_refused():
    with pytest.raises(ConfigError, match="a mirror is not downloaded"):
        RayServeEngine(config("", source=SimpleNamespace(bucket_uri="s3://x")))
