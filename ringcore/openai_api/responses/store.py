"""The responses that a service remembers, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from ringcore.openai_api.errors import ApiError

__all__ = ["ResponseStore", "StoredResponse"]


class StoredResponse(msgspec.Struct, frozen=True):
    """A response, and the items of the conversation that it answers, without its instructions."""

    response: Mapping[str, Any]  # a `ResponseObject`
    input_items: list[dict[str, Any]]

    def conversation_items(self) -> list[dict[str, Any]]:
        """With the output, of which a call that was cut short is left out."""
        output = self.response["output"]
        whole = [one for one in output if one["type"] != "function_call" or one["status"] == "completed"]
        return [*self.input_items, *whole]


class _Encoded(NamedTuple):
    """As JSON."""

    stored: bytes
    items: dict[str, bytes]  # the output's, by id

    @property
    def num_bytes(self) -> int:
        return len(self.stored) + sum(map(len, self.items.values()))


class ResponseStore:
    """Responses by id, and their output items by theirs, in memory. The least recently used responses make room for
    others; one that is larger than the whole bound is not kept. For one event loop.

    Invariant: there are at most max_responses, of num_bytes <= max_bytes in all, as JSON.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, _Encoded] = OrderedDict()  # the least recently used one first
        self._response_of: dict[str, str] = {}  # by the id of an item
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """The id must be new."""
        response_id, items = stored.response["id"], stored.response["output"]
        encoded = _Encoded(msgspec.json.encode(stored), {one["id"]: msgspec.json.encode(one) for one in items})
        num_bytes = encoded.num_bytes
        if not self.keeps_any or num_bytes > self._max_bytes:
            return
        while len(self._responses) >= self._max_responses or self.num_bytes + num_bytes > self._max_bytes:
            self._forget(*self._responses.popitem(last=False))
        self._responses[response_id] = encoded
        self._response_of |= dict.fromkeys(encoded.items, response_id)
        self.num_bytes += num_bytes

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises 404 for an id that is unknown, dropped or deleted. param: the client's field that has it."""
        encoded = self._responses.get(response_id)
        if encoded is None:
            raise _not_found(response_id, param)
        self._responses.move_to_end(response_id)
        return _decoder.decode(encoded.stored)

    def get_item(self, item_id: str, param: str) -> dict[str, Any]:
        """An output item of a stored response. Raises 404, as `get`."""
        response_id = self._response_of.get(item_id)
        if response_id is None:
            raise _item_not_found(item_id, param)
        self._responses.move_to_end(response_id)
        item: dict[str, Any] = msgspec.json.decode(self._responses[response_id].items[item_id])
        return item

    def delete(self, response_id: str) -> None:
        """Raises 404, as `get`. Later responses of the conversation stay whole."""
        encoded = self._responses.pop(response_id, None)
        if encoded is None:
            raise _not_found(response_id, None)
        self._forget(response_id, encoded)

    def _forget(self, response_id: str, encoded: _Encoded) -> None:
        self.num_bytes -= encoded.num_bytes
        for item_id in encoded.items:
            del self._response_of[item_id]


_decoder = msgspec.json.Decoder(StoredResponse)


def _not_found(response_id: str, param: str | None) -> ApiError:
    code = "response_not_found" if param is None else "previous_response_not_found"
    message = f"the response {response_id[:80]!r} is not stored, or no longer; send the whole conversation as input"
    return ApiError(HTTPStatus.NOT_FOUND, message, param=param, code=code)


def _item_not_found(item_id: str, param: str) -> ApiError:
    message = f"{param}: the item {item_id[:80]!r} is not stored, or no longer; send the item itself"
    return ApiError(HTTPStatus.NOT_FOUND, message, param=param)
