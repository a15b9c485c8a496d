"""OpenAI's batch lines: {"custom_id", "method", "url", "body"}, and its results."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError

from ringcore.batch.journal import Record
from ringcore.batch.lines import InputLine, LineError, Outcome, seed_of_line
from ringcore.errors import InvalidRequestError
from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.errors import api_error_of, invalid_body
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest
from ringcore.openai_api.served_model import ServedModel

__all__ = ["ENDPOINTS", "OpenAiLines"]

_BODIES: dict[str, type[CompletionRequest | ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
ENDPOINTS = tuple(_BODIES)


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


_decoder = msgspec.json.Decoder(_Line)


class _Id(msgspec.Struct):
    custom_id: str


class OpenAiLines:
    """job_hash: makes the ids of results, which are the same however often a job is resumed. url: the only one that a
    line may have; None for any."""

    def __init__(self, job_hash: str, job_seed: int, url: str | None = None) -> None:
        self._job, self._seed, self._url = job_hash[:16], job_seed, url

    def prefix(self, text: bytes) -> bytes:
        try:
            body = _decoder.decode(text).body
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return b""
        parts = [body.get("cache_salt"), body.get("tools"), body.get("messages", body.get("prompt"))]
        return msgspec.json.encode(parts)

    async def answer(self, model: ServedModel, line: InputLine) -> Outcome:
        body = await self._completed(model, line, self._parse(line))
        usage = body["usage"]
        record = Record(line.number, False, usage["prompt_tokens"], usage["completion_tokens"])
        return self._outcome(line, record, self._response(line, 200, body))

    def failed(self, line: InputLine, error: Exception) -> Outcome:
        record = Record(line.number, True, 0, 0)
        if isinstance(error, LineError):
            code, message = error.args
            return self._outcome(line, record, {"response": None, "error": {"code": code, "message": message}})
        told = api_error_of(error)
        return self._outcome(line, record, self._response(line, told.status, told.body()))

    def _parse(self, line: InputLine) -> _Line:
        if line.text is None:
            raise LineError("line_too_long", f"line {line.number}: it is too long; raise max_line_bytes")
        try:
            return _decoder.decode(line.text)
        except msgspec.ValidationError as error:
            raise LineError("invalid_line", f"line {line.number}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError("invalid_json_line", f"line {line.number} is no JSON: {error}") from error

    async def _completed(self, model: ServedModel, line: InputLine, parsed: _Line) -> Any:
        if parsed.method != "POST":
            raise InvalidRequestError(f"method={parsed.method!r}: give 'POST'", field="method")
        if parsed.url == "/v1/embeddings":
            raise InvalidRequestError(
                f"url={parsed.url!r}: embeddings are no part of a batch; send them to the service", field="url"
            )
        if parsed.url not in _BODIES or self._url not in (None, parsed.url):
            urls = ENDPOINTS if self._url is None else (self._url,)
            raise InvalidRequestError(f"url={parsed.url!r}: give {' or '.join(map(repr, urls))}", field="url")
        try:
            body = _BODIES[parsed.url].model_validate(parsed.body)
        except ValidationError as error:
            raise invalid_body([dict(finding) for finding in error.errors()]) from error
        if body.stream:
            raise InvalidRequestError("stream: not in a batch; leave it out", field="stream")
        if body.seed is None:
            body.seed = seed_of_line(self._seed, line.number)
        name = f"{self._job}-{line.number}"
        if isinstance(body, ChatCompletionRequest):
            return await Chat(model, body, f"chatcmpl-{name}").whole()
        return await Completions(model, body, f"cmpl-{name}").whole()

    def _response(self, line: InputLine, status: int, body: Any) -> dict[str, Any]:
        request_id = f"req_{self._job}_{line.number}"
        return {
            "response": {"status_code": int(status), "request_id": request_id, "body": body},
            "error": None,
        }

    def _outcome(self, line: InputLine, record: Record, result: dict[str, Any]) -> Outcome:
        head = {"id": f"batch_req_{self._job}_{line.number}", "custom_id": _custom_id(line)}
        return Outcome(record, msgspec.json.encode(head | result) + b"\n")


def _custom_id(line: InputLine) -> str | None:
    """Also of a line that is wrong otherwise."""
    try:
        return msgspec.json.decode(line.text or b"", type=_Id).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
