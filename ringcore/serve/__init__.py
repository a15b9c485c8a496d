"""An OpenAI-compatible service around an `AsyncEngine`: an ASGI application. Needs `pip install ringcore[serve]`.

    async with AsyncEngine("path/to/model") as engine:
        server = uvicorn.Server(uvicorn.Config(create_app(engine), lifespan="off"))
        await server.serve()

Read `app.py` first: it lists every endpoint.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcore.serve.app import create_app
    from ringcore.serve.options import ServiceOptions

__all__ = ["ServiceOptions", "create_app"]

_MODULES = {"create_app": "ringcore.serve.app", "ServiceOptions": "ringcore.serve.options"}


def __getattr__(name: str) -> Any:
    """`create_app` loads FastAPI; the options do not, and the command line needs only them to show its help. The
    Markdown process needs neither."""
    if name in _MODULES:
        return vars(import_module(_MODULES[name]))[name]
    raise AttributeError(f"module 'ringcore.serve' has no attribute {name!r}")
