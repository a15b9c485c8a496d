"""OpenAI's batch lines: {"custom_id", "method", "url", "body"}, and its results."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError

from ringcore.batch.journal import Record
from ringcore.batch.lines import InputLine, LineError, Outcome, seed_of_line
from ringcore.batch.openai_bodies import BODIES, BodyKind
from ringcore.errors import InvalidRequestError
from ringcore.openai_api.errors import api_error_of, invalid_body
from ringcore.openai_api.served_model import ServedModel

__all__ = ["ENDPOINTS", "OpenAiLines"]

ENDPOINTS = tuple(BODIES)


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
        names = ("cache_salt", "tools", "instructions", "messages", "prompt", "input")
        return msgspec.json.encode([body.get(name) for name in names])

    async def answer(self, model: ServedModel, line: InputLine) -> Outcome:
        parsed = self._parse(line)
        kind = self._kind(parsed)
        body = await self._completed(model, line, parsed, kind)
        record = Record(line.number, False, *kind.num_tokens(body["usage"]))
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

    def _kind(self, parsed: _Line) -> BodyKind:
        if parsed.method != "POST":
            raise InvalidRequestError(f"method={parsed.method!r}: give 'POST'", field="method")
        if parsed.url not in BODIES or self._url not in (None, parsed.url):
            urls = ENDPOINTS if self._url is None else (self._url,)
            raise InvalidRequestError(f"url={parsed.url!r}: give {' or '.join(map(repr, urls))}", field="url")
        return BODIES[parsed.url]

    async def _completed(self, model: ServedModel, line: InputLine, parsed: _Line, kind: BodyKind) -> Any:
        try:
            body = kind.schema.model_validate(parsed.body)
        except ValidationError as error:
            raise invalid_body([dict(finding) for finding in error.errors()]) from error
        if parsed.body.get("stream"):
            raise InvalidRequestError("stream: not in a batch; leave it out", field="stream")
        name, seed = f"{self._job}-{line.number}", seed_of_line(self._seed, line.number)
        return await kind.asked(model, body, name, seed).whole()

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
