"""Protection against cross-site requests and DNS rebinding: checks the Host and Origin headers."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ringcore.openai_api.errors import ApiError
from ringcore.serve.errors import error_response
from ringcore.serve.hosts import ANY, AllowedHosts, is_same_origin
from ringcore.serve.options import ServiceOptions

__all__ = ["BrowserGate"]

_SHOWN = 100  # characters


class BrowserGate:
    """ASGI middleware: accepts a request whose Host is allowed, and whose Origin is allowed, the service's own, or
    absent.

    A GET without an Origin, such as one for an image, is accepted from any page: the page cannot read the answer.
    """

    def __init__(self, app: ASGIApp, options: ServiceOptions) -> None:
        self._app = app
        self._hosts = AllowedHosts(options.allowed_hosts or (ANY,))
        self._origins = options.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            host = self._check_host(headers, scope)
            self._check_origin(headers, scope, host)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> str | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"HTTP/1.1 requires one Host header and there are {len(hosts)}")
        if not hosts:
            return None  # HTTP/1.0, which browsers do not send
        if not self._hosts.have(hosts[0]):
            raise ApiError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the host {hosts[0][:_SHOWN]!r} is not allowed; allow it by --allowed-host (allowed_hosts)",
                code="host_not_allowed",
            )
        return hosts[0]

    def _check_origin(self, headers: Headers, scope: Scope, host: str | None) -> None:
        origin = headers.get("origin")
        if origin is None or ANY in self._origins or origin in self._origins:
            return
        if host is not None and is_same_origin(origin, scope["scheme"], host):
            return
        if headers.get("sec-fetch-site") == "same-origin":
            return  # only browsers set it, and it stays correct after a proxy that changes the scheme or the host
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"the origin {origin[:_SHOWN]!r} is not allowed; allow it by --allowed-origin (allowed_origins)",
            code="origin_not_allowed",
        )
