"""Plain lines: a prompt and sampling parameters, {"prompt": "Water boils at", "max_tokens": 8}, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from ringcore.batch.journal import Record
from ringcore.batch.lines import InputLine, Outcome, seed_of_line
from ringcore.errors import InvalidRequestError, RingcoreError, UnknownOptionError, unknown_option
from ringcore.front_end.output_stream import OutputStream
from ringcore.openai_api.errors import ApiError
from ringcore.openai_api.served_model import ServedModel
from ringcore.params.outputs import CompletionOutput, RequestOutput
from ringcore.params.sampling_params import SamplingParams
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["PlainLines"]

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OF_PROMPTS = ("priority", "cache_salt")
_OF_CHATS = ("add_generation_prompt", "tools", "chat_template_kwargs")
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "output_kind")
_FIELDS = ("custom_id", *_PROMPTS, *_OF_PROMPTS, *_OF_CHATS, *_SAMPLING)


class PlainLines:
    """defaults: sampling parameters of lines that do not have them; before those of the model."""

    def __init__(self, job_seed: int, defaults: Mapping[str, Any]) -> None:
        self._seed, self._defaults = job_seed, dict(defaults)

    def prefix(self, text: bytes) -> bytes:
        try:
            given = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return b""
        if not isinstance(given, dict):
            return b""
        return msgspec.json.encode([given.get(name) for name in ("cache_salt", "tools", *_PROMPTS)])

    async def answer(self, model: ServedModel, line: InputLine) -> Outcome:
        given = _parse(line)
        custom_id = given.pop("custom_id", None) or line.number
        output = await self._complete(model, line, given)
        num_prompt, num_output = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
        result: dict[str, Any] = {
            "custom_id": custom_id,
            "outputs": [_output(completion) for completion in output.outputs],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output},
            "error": None,
        }
        if output.prompt_logprobs is not None:
            result["prompt_logprobs"] = output.prompt_logprobs
        return Outcome(Record(line.number, False, num_prompt, num_output), msgspec.json.encode(result) + b"\n")

    def failed(self, line: InputLine, error: Exception) -> Outcome:
        try:
            custom_id = _parse(line).get("custom_id")
        except InvalidRequestError:
            custom_id = None
        result: dict[str, Any] = {
            "custom_id": custom_id or line.number,
            "outputs": [],
            "usage": None,
            "error": _shown(error),
        }
        return Outcome(Record(line.number, True, 0, 0), msgspec.json.encode(result) + b"\n")

    async def _complete(self, model: ServedModel, line: InputLine, given: dict[str, Any]) -> RequestOutput:
        params = self._params(line, given, model.sampling_defaults)
        last: RequestOutput | None = None

        async def take(output: RequestOutput) -> None:
            nonlocal last
            last = output

        await model.consume(_outputs(model, given, params), take)
        assert last is not None, "an iterator ended without an output"
        return last

    def _params(self, line: InputLine, given: Mapping[str, Any], of_model: Mapping[str, Any]) -> SamplingParams:
        for name in given:
            if name not in _FIELDS:
                raise unknown_option(name, _FIELDS, "field of a line")
        own = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        asked = {**of_model, **self._defaults, **own}
        asked.setdefault("seed", seed_of_line(self._seed, line.number))
        structured = asked.get("structured_outputs")
        if isinstance(structured, dict):
            names = [f.name for f in fields(StructuredOutputsParams)]
            for name in structured:
                if name not in names:
                    raise unknown_option(str(name), names, "structured output")
            asked["structured_outputs"] = StructuredOutputsParams(**structured)
        if isinstance(asked.get("logit_bias"), dict):
            asked["logit_bias"] = {_token_id(token): bias for token, bias in asked["logit_bias"].items()}
        return SamplingParams(**asked, output_kind="final")


def _parse(line: InputLine) -> dict[str, Any]:
    if line.text is None:
        raise InvalidRequestError(f"line {line.number}: it is too long; raise max_line_bytes", field="line")
    try:
        given = msgspec.json.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"line {line.number} is no JSON: {error}", field="line") from error
    if not isinstance(given, dict):
        raise InvalidRequestError(f"line {line.number}: give an object, as {{'prompt': 'Once'}}", field="line")
    if not isinstance(given.get("custom_id"), str | int | None) or isinstance(given.get("custom_id"), bool):
        raise InvalidRequestError(f"line {line.number}: custom_id: give a string", field="custom_id")
    return given


def _outputs(model: ServedModel, given: Mapping[str, Any], params: SamplingParams) -> OutputStream:
    if [name in given for name in _PROMPTS].count(True) != 1:
        raise InvalidRequestError("prompt: give one of prompt, prompt_token_ids and messages", field="prompt")
    common: dict[str, Any] = {name: given[name] for name in _OF_PROMPTS if name in given}
    if "messages" not in given:
        for name in _OF_CHATS:
            if name in given:
                raise InvalidRequestError(f"{name}: only of use with messages; leave it out", field=name)
        return model.engine.generate({name: given[name] for name in _PROMPTS if name in given}, params, **common)
    messages = given["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise InvalidRequestError("messages: give a list of objects with role and content", field="messages")
    common |= {name: given[name] for name in _OF_CHATS if name in given}
    return model.engine.chat(model.template_messages(messages), params, **common)


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(f"logit_bias: {text!r} is no token id", field="logit_bias") from None


def _output(completion: CompletionOutput) -> dict[str, Any]:
    output: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        output |= {"logprobs": completion.logprobs, "cumulative_logprob": completion.cumulative_logprob}
    return output


def _shown(error: Exception) -> dict[str, Any]:
    if isinstance(error, ApiError):
        return {"type": "InvalidRequestError", "message": error.message, "field": error.param}
    if not isinstance(error, RingcoreError):
        return {"type": "InternalError", "message": "the job failed at this line; see its log", "field": None}
    field = error.details.get("option" if isinstance(error, UnknownOptionError) else "field")
    return {"type": type(error).__name__, "message": error.message.partition("\n")[0], "field": field}
