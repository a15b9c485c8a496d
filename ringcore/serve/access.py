"""Which key opens which path, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Scope

from ringcore.openai_api.errors import ApiError
from ringcore.serve.chat_page import PAGE_PATHS
from ringcore.serve.options import ServiceOptions

__all__ = ["ADMIN_PATHS", "MONITORING_PATHS", "OPEN_PATHS", "Access"]

# Monitoring needs no key; the chat page has no secrets and asks the user for a key.
METRICS_PATH = "/metrics"
MONITORING_PATHS = frozenset({"/health", "/health/live", "/health/ready", METRICS_PATH})
OPEN_PATHS = MONITORING_PATHS | PAGE_PATHS
# Of `admin.endpoints`. A path that is not here would be opened by the keys of requests.
ADMIN_PATHS = frozenset(
    {
        "/abort_requests", "/collective_rpc", "/finish_weight_update", "/get_world_size", "/is_paused", "/is_sleeping",
        "/pause", "/reload_weights", "/reset_prefix_cache", "/resume", "/server_info", "/sleep", "/start_profile",
        "/start_weight_update", "/stop_profile", "/update_weights", "/wake_up",
    }
)  # fmt: skip


class Access:
    """The keys of a service: those of requests, and those of admin calls. Neither opens what the other one does."""

    def __init__(self, options: ServiceOptions) -> None:
        self._of_requests, self._of_admin = _Keys(options.api_keys), _Keys(options.admin_api_keys)
        self._of_metrics = _Keys((*options.api_keys, *options.admin_api_keys))
        self._open = OPEN_PATHS - {METRICS_PATH} if options.metrics_need_key else OPEN_PATHS

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises 401 without a valid key, and 403 for an admin call where there is no admin key."""
        path = _path_of(scope)
        if path in ADMIN_PATHS:
            self._check_admin(path, headers)
        elif path not in self._open:
            keys = self._of_metrics if path == METRICS_PATH else self._of_requests
            if keys and not keys.have(headers):
                raise _unauthorized("no valid API key; send one of the service's keys")

    def _check_admin(self, path: str, headers: Headers) -> None:
        if not self._of_admin:
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"{path} needs an admin key, and this service has none; start it with --admin-api-key-file "
                "(ServiceOptions.admin_api_keys)",
                code="no_admin_key",
            )
        if not self._of_admin.have(headers):
            raise _unauthorized(
                f"no valid admin key; {path} takes one of --admin-api-key, and no key of requests, sent"
            )


class _Keys:
    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def have(self, headers: Headers) -> bool:
        """Whether the key that a client sends is one of these."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key:  # as Anthropic's clients send it
            scheme, key = "bearer", headers.get("x-api-key", "")
        given = _digest(key.strip().encode(errors="replace"))
        # Constant time: comparing the digests of all keys reveals nothing about a key or its length.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _path_of(scope: Scope) -> str:
    """The path that the router matches: below the one at which the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        f"{message} as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
