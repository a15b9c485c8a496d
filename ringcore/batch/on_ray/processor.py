"""A processor for Ray Data's batch inference, by `ray.data.llm.build_processor(RingcoreProcessorConfig(...))`.

Ray has processors of a few engines; another is its `ProcessorConfig`, a builder registered for that, and a stage.
`RAY_TESTED` of `serve/ray_engine.py` says with which versions of Ray; the extra is `ray`. There is one stage, for rows
as plain lines: the engine renders chats, tokenizes and detokenizes itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import ray
from pydantic import Field
from ray.data.llm import Processor, ProcessorConfig
from ray.llm._internal.batch.processor import ProcessorBuilder
from ray.llm._internal.batch.stages.base import StatefulStage, StatefulStageUDF

from ringcore.batch.lines import InputLine
from ringcore.batch.on_ray.actor import EngineActor
from ringcore.batch.options import BatchOptions
from ringcore.batch.plain_lines import PlainLines
from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, RingcoreError

__all__ = ["EngineStage", "EngineUDF", "RingcoreProcessorConfig"]

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_ERROR = "__inference_error__"  # Ray's column: rows that have a text there are given to no later stage
_PROMPTS = {"messages": "messages", "tokenized_prompt": "prompt_token_ids", "prompt_token_ids": "prompt_token_ids"}
_PROMPTS |= {"prompt": "prompt"}
_OF_PROMPTS = ("priority", "cache_salt")
_OF_CHATS = ("add_generation_prompt", "tools", "chat_template_kwargs")


class RingcoreProcessorConfig(ProcessorConfig):
    """The fields are those of Ray's own engines' configurations, and mean the same."""

    model_source: str = Field(description="the engine's `model`")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="the engine's other options")
    resources_per_rank: dict[str, float] | None = Field(
        default=None, description="what Ray reserves for each rank; None means a GPU, or a CPU with device='cpu'"
    )
    runtime_env: dict[str, Any] | None = Field(default=None, description="of the engines' actors")
    max_concurrent_batches: int = Field(default=8, description="batches that an engine has at once")
    max_tasks_in_flight_per_actor: int | None = Field(default=None, description="of Ray's `ActorPoolStrategy`")
    should_continue_on_error: bool = Field(
        default=False, description=f"a row that fails has an error in {_ERROR}, and ends no job"
    )


class EngineUDF(StatefulStageUDF):
    """An engine in an actor of Ray Data. An engine that dies is replaced, as in a batch job; after `engine_restarts`
    deaths in a row without a result the actor ends, and Ray runs its rows again by another one."""

    def __init__(
        self,
        data_column: str,
        expected_input_keys: list[str],
        engine_options: Mapping[str, Any],
        should_continue_on_error: bool,
    ) -> None:
        super().__init__(data_column, expected_input_keys)
        self._continues = should_continue_on_error
        self._engine = EngineActor(engine_options, BatchOptions())
        self._started: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the actor's
        self._numbers = itertools.count(1)

    async def _start(self) -> None:
        await self._engine.start()
        await self._engine.serve(PlainLines(secrets.randbits(62), {}))

    async def udf(self, rows: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """A result for each row. Raises `RingcoreError` for a row that fails, unless it may continue."""
        if self._started is None:
            self._loop = asyncio.get_running_loop()
            self._started = self._loop.create_task(self._start())
        await asyncio.shield(self._started)
        for done in asyncio.as_completed([self._answered(row) for row in rows]):
            yield await done

    async def _answered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            line = msgspec.json.encode(_line_of(row), enc_hook=_builtin)
            answer = await self._engine.answer(InputLine(number, line))
            result = msgspec.json.decode(answer.outcome.written)
        except InvalidRequestError as error:
            result = {"error": {"message": error.message}}
        except RingcoreError as error:  # no engine can be kept alive here
            _end_actor(error)
        if result["error"] is not None and not self._continues:
            raise InvalidRequestError(result["error"]["message"], field="row")
        return _columns_of(result) | {self.IDX_IN_BATCH_COLUMN: row[self.IDX_IN_BATCH_COLUMN]}

    def __del__(self) -> None:
        """Ray deletes it before the actor ends, in another thread than the event loop's."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result(_CLOSE_S)


def _line_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """As a plain line: of messages, token ids and a text the first that it has, since a row keeps all its columns."""
    sampling = {name: value for name, value in (row.get("sampling_params") or {}).items() if value is not None}
    sampling.pop("detokenize", None)  # Ray's own example gives it to engines whose texts another stage makes
    for column, name in _PROMPTS.items():
        if row.get(column) is not None:
            others = _OF_PROMPTS + (_OF_CHATS if column == "messages" else ())
            return {name: row[column]} | {one: row[one] for one in others if row.get(one) is not None} | sampling
    raise InvalidRequestError(f"prompt: the row has none of {', '.join(_PROMPTS)}", field="prompt")


def _builtin(value: Any) -> Any:
    """Of an array or a scalar of numpy."""
    return value.tolist()


def _columns_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of Ray's own engine stages, with the first completion as the text."""
    if result["error"] is not None:
        empty = {"generated_text": "", "finish_reason": "", "num_input_tokens": 0, "num_generated_tokens": 0}
        return empty | {_ERROR: result["error"]["message"]}
    first, usage = result["outputs"][0], result["usage"]
    return {
        "generated_text": first["text"],
        "finish_reason": first["finish_reason"],
        "num_input_tokens": usage["prompt_tokens"],
        "num_generated_tokens": usage["completion_tokens"],
        _ERROR: "",
    }


def _end_actor(error: RingcoreError) -> None:
    """Ray then runs the actor's tasks again; what a task raises it would raise again, in the same actor."""
    _log.error("the actor ends, so that another one takes its rows: %s", error.message)
    os._exit(1)


class EngineStage(StatefulStage):
    fn: type[StatefulStageUDF] = EngineUDF

    def get_required_input_keys(self) -> dict[str, str]:
        return {}

    def get_optional_input_keys(self) -> dict[str, str]:
        return {
            "messages": "A conversation, or instead:",
            "tokenized_prompt": "token ids, or instead:",
            "prompt": "a text.",
            "sampling_params": "The fields of ringcore.SamplingParams.",
        }


def _build(
    config: RingcoreProcessorConfig,
    preprocess: Callable[..., Any] | None = None,
    postprocess: Callable[..., Any] | None = None,
    preprocess_map_kwargs: dict[str, Any] | None = None,
    postprocess_map_kwargs: dict[str, Any] | None = None,
) -> Processor:
    options = {"model": config.model_source, **config.engine_kwargs}
    parallel = EngineConfig.from_options(**options).parallel  # what is wrong is told here
    rank = config.resources_per_rank or ({"CPU": 1} if options.get("device") == "cpu" else {"GPU": 1})
    of_all = {name: amount * parallel.layout.world_size for name, amount in rank.items()}
    resources = {
        "num_cpus": of_all.pop("CPU", None),
        "num_gpus": of_all.pop("GPU", None),
        "resources": of_all or None,
        "accelerator_type": config.accelerator_type,
        "runtime_env": config.runtime_env,
    }
    stage = EngineStage(
        fn_constructor_kwargs={
            "engine_options": options,
            "should_continue_on_error": config.should_continue_on_error,
        },
        map_batches_kwargs={
            "compute": ray.data.ActorPoolStrategy(
                **config.get_concurrency(), max_tasks_in_flight_per_actor=config.max_tasks_in_flight_per_actor
            ),
            "max_concurrency": config.max_concurrent_batches,
            **{name: value for name, value in resources.items() if value is not None},
        },
    )
    return Processor(
        config,
        [stage],
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs,
        postprocess_map_kwargs=postprocess_map_kwargs,
    )


ProcessorBuilder.register(RingcoreProcessorConfig, _build)
