"""The chat page at `/`: static files of `page/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

__all__ = ["PAGE_PATHS", "add_chat_page"]

_FOLDER = Path(__file__).parent / "page"
_MODULES = (
    "api", "chats", "clipboard", "conversation", "elements", "engine", "figures", "key", "markdown", "page", "settings",
    "store", "turn", "turn_view",
)  # fmt: skip
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in _MODULES},
}
PAGE_PATHS = frozenset(_FILES)

_HEADERS = {
    # The page loads only its own files. Model output can never become a script: the page never parses text as HTML, and
    # Trusted Types make the browser refuse it.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a new version of the service has a new page
}


def add_chat_page(app: FastAPI) -> None:
    """Adds the page's files, read once, without an entry in the OpenAPI document."""
    for path, (name, media_type) in _FILES.items():
        content = (_FOLDER / name).read_bytes()
        app.add_api_route(path, _serving(content, media_type), include_in_schema=False)


def _serving(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return serve
