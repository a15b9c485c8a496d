"""The responses that a service remembers, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from ringcore.openai_api.errors import ApiError

__all__ = ["ResponseStore", "StoredResponse"]


class StoredResponse(msgspec.Struct, frozen=True):
    """A response, and the messages of its conversation, its output included, without its instructions."""

    response: Mapping[str, Any]  # a `ResponseObject`
    messages: list[dict[str, Any]]


class ResponseStore:
    """Responses by id, in memory. The least recently used ones make room for others; one that is larger than the whole
    bound is not kept. For one event loop.

    Invariant: there are at most max_responses, of num_bytes <= max_bytes in all, as JSON.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, bytes] = OrderedDict()  # the least recently used one first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """The id must be new."""
        encoded = msgspec.json.encode(stored)
        if not self.keeps_any or len(encoded) > self._max_bytes:
            return
        while len(self._responses) >= self._max_responses or self.num_bytes + len(encoded) > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self.num_bytes -= len(dropped)
        self._responses[stored.response["id"]] = encoded
        self.num_bytes += len(encoded)

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises 404 for an id that is unknown, dropped or deleted. param: the client's field that has it."""
        encoded = self._responses.get(response_id)
        if encoded is None:
            raise _not_found(response_id, param)
        self._responses.move_to_end(response_id)
        return _decoder.decode(encoded)

    def delete(self, response_id: str) -> None:
        """Raises 404, as `get`. Later responses of the conversation stay whole."""
        encoded = self._responses.pop(response_id, None)
        if encoded is None:
            raise _not_found(response_id, None)
        self.num_bytes -= len(encoded)


_decoder = msgspec.json.Decoder(StoredResponse)


def _not_found(response_id: str, param: str | None) -> ApiError:
    code = "response_not_found" if param is None else "previous_response_not_found"
    message = f"the response {response_id[:80]!r} is not stored, or no longer; send the whole conversation as input"
    return ApiError(HTTPStatus.NOT_FOUND, message, param=param, code=code)
