"""Items of a conversation as they are stored and listed: with ids, and texts as parts."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.responses.answers import InputItemList
from ringcore.openai_api.responses.output_items import new_id

__all__ = ["list_items", "listed"]

_STATUSES = ("in_progress", "completed", "incomplete")
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def listed(item: Mapping[str, Any], taken_ids: Container[str]) -> dict[str, Any]:
    """item: valid, and no reference. It keeps its id, unless that is taken, and loses what its type does not have."""
    kind, item_id, status = item.get("type", "message"), item.get("id"), item.get("status")
    if not isinstance(item_id, str) or not item_id or item_id in taken_ids:
        item_id = new_id(_ID_PREFIXES[kind])
    status = status if status in _STATUSES else "completed"
    return {"id": item_id, "type": kind, "status": status, **_fields(kind, item)}


def _fields(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    match kind:
        case "function_call":
            return {name: item[name] for name in ("call_id", "name", "arguments")}
        case "function_call_output":
            return {name: item[name] for name in ("call_id", "output")}
        case "reasoning":
            content, summary = item.get("content") or [], item.get("summary") or []
            return {"summary": _parts(summary, "summary_text"), "content": _parts(content, "reasoning_text")}
        case _:
            role = item["role"]
            parts = _parts(item["content"], "output_text" if role == "assistant" else "input_text")
            if role == "assistant":
                parts = [part | {"annotations": part.get("annotations") or []} for part in parts]
            return {"role": role, "content": parts}


def _parts(content: Any, kind: str) -> list[dict[str, Any]]:
    """Parts as they are; none of what is neither a text nor parts, as a summary may be, which is not read."""
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return content if isinstance(content, list) else []


def list_items(
    items: Sequence[dict[str, Any]], after: str | None, limit: int, order: Literal["asc", "desc"]
) -> InputItemList:
    """A page of at most `limit` items, which begins after the item of the id `after`. Raises `InvalidRequestError`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after: the response has no item {after[:80]!r}; give the last_id of a page", field="after"
            )
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(object="list", data=page, first_id=first, last_id=last, has_more=len(ordered) > limit)
