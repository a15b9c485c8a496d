"""HEAD and OPTIONS for every endpoint."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Methods"]


class Methods:
    """ASGI middleware: answers HEAD as GET without the body, and OPTIONS with the path's methods, as a 405 does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, _Answer(send, scope, has_body=False).send)
        elif scope["method"] == "OPTIONS" and scope["path"] == "*":  # of the service as a whole
            allow = {"Allow": "GET, HEAD, POST, OPTIONS"}
            await Response(status_code=HTTPStatus.NO_CONTENT, headers=allow)(scope, receive, send)
        else:
            is_options = scope["method"] == "OPTIONS"
            await self._app(scope, receive, _Answer(send, scope, is_options=is_options).send)


class _Answer:
    """Rewrites one response of the application."""

    def __init__(self, send: Send, scope: Scope, *, has_body: bool = True, is_options: bool = False) -> None:
        self._send, self._scope = send, scope
        self._has_body = has_body
        self._is_options = is_options

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.METHOD_NOT_ALLOWED:
            message = self._with_methods(message)
        elif message["type"] == "http.response.body" and not self._has_body:
            message = {**message, "body": b""}
        await self._send(message)

    def _with_methods(self, message: Message) -> Message:
        """Gives the `Allow` header the methods of every route of the path; the router names those of one."""
        methods = _methods_of(self._scope)
        also = ["HEAD", "OPTIONS"] if "GET" in methods else ["OPTIONS"]
        allow = ", ".join([*sorted(methods), *also])
        if self._is_options:
            self._has_body = False
            return {**message, "status": HTTPStatus.NO_CONTENT, "headers": [(b"allow", allow.encode())]}
        headers = MutableHeaders(raw=list(message["headers"]))
        headers["allow"] = allow
        return {**message, "headers": headers.raw}


def _methods_of(scope: Scope) -> set[str]:
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    found = [route.methods or set() for route in routes if route.matches(scope)[0] is not Match.NONE]
    return set().union(*found) - {"HEAD", "OPTIONS"}
