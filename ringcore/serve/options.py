"""Options of a service: names, keys, allowed hosts and origins, limits and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ringcore.chat import choose_format
from ringcore.errors import ConfigError
from ringcore.params.field_checks import MAX_TIMEOUT_S, is_timeout
from ringcore.serve.hosts import AllowedHosts, check_origins

__all__ = ["ServiceOptions"]


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"option": doc})


_COUNTS = (
    "max_body_bytes", "max_n", "max_concurrent_requests", "max_connections", "max_header_bytes",
    "max_batch_file_bytes", "max_batch_dir_bytes", "max_batch_requests_in_flight", "max_stored_response_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The limits and access rules of a service. Raises `ConfigError`.

    served_model_names: names by which clients may request the model; responses have the first one. Default: the
        engine's `model` option.
    api_keys: a client must send one of these as "Authorization: Bearer KEY", except for /health and /metrics. Default:
        every client has access.
    admin_api_keys: keys of their own, one of which each admin call must send (`access.ADMIN_PATHS`). Default: such
        calls are refused.
    allowed_hosts: allowed values of the Host header: names ("example.com", "*.example.com"), addresses, networks
        ("10.0.0.0/8"), or "*" for all. Default: all; `ringcore serve` then computes a list unless there are keys.
    allowed_origins: pages of these origins ("https://example.com", or "*" for all) may call the service from a browser,
        in addition to the service's own. Requests with another Origin are answered 403.
    tool_call_parser, reasoning_parser: the format of the model's tool calls, and of its reasoning: one of
        `ringcore.chat.TOOL_CALL_FORMATS` and of `REASONING_FORMATS`, "harmony" for both. "auto" detects it from the
        chat template; with None nothing is parsed, and tools are refused unless a call is forced.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    max_body_bytes: int = _option(4 << 20, "the largest body of a request; a larger one is answered 413")
    body_timeout_s: float = _option(60.0, "seconds that a client has to send a body, until it is answered 408")
    max_n: int = _option(16, "the most completions of one prompt")
    max_concurrent_requests: int = _option(
        1024, "completions in flight at once, n of each prompt; requests beyond that are answered 429"
    )
    strict: bool = _option(False, "refuse unknown fields of a request; else the log warns once of each")
    trust_request_chat_template: bool = _option(
        False, "a chat request may bring its own chat_template, which runs in the tokenizer's sandbox"
    )
    max_stored_responses: int = _option(
        1000, "responses of /v1/responses that are kept for later requests; 0 keeps none"
    )
    max_stored_response_bytes: int = _option(
        64 << 20, "the size of all stored responses with their conversations; the least recently used make room"
    )
    metrics_need_key: bool = _option(False, "/metrics needs a key too, one of requests or of admin calls")
    batch_dir: str | None = _option(None, "a folder for files and batches; without it there is no /v1/batches")
    max_batch_file_bytes: int = _option(200 << 20, "the largest file that may be uploaded")
    max_batch_dir_bytes: int = _option(
        10 << 30, "the size of all uploaded files and results; beyond, an upload is answered 413"
    )
    max_batch_requests_in_flight: int = _option(64, "requests of the running batch at once, beside those of clients")
    # Only for `ringcore serve`: another ASGI server has its own limits.
    max_connections: int = _option(
        4096, "open connections, at most as many as RLIMIT_NOFILE allows; beyond, waiting ones are closed, or it is 503"
    )
    max_connections_per_peer: int | None = _option(
        None, "open connections of one address; beyond, 429; leave it out where a proxy is the only peer"
    )
    header_timeout_s: float = _option(10.0, "seconds for a request's head, until it is answered 408")
    max_header_bytes: int = _option(64 << 10, "the largest head of a request; a larger one is answered 431")
    keep_alive_timeout_s: float = _option(5.0, "seconds that a connection may be idle between two requests")
    send_timeout_s: float = _option(60.0, "seconds in which a client may take nothing of its answer")

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._check_integer(name)
        self._check_integer("max_stored_responses", least=0)
        if self.max_connections_per_peer is not None:
            self._check_integer("max_connections_per_peer")
        for name in ("body_timeout_s", "header_timeout_s", "keep_alive_timeout_s", "send_timeout_s"):
            seconds = getattr(self, name)
            if not is_timeout(seconds) or not seconds:
                raise _bad(name, seconds, f"give a positive number of seconds, at most {MAX_TIMEOUT_S:.0f}")
        AllowedHosts(self.allowed_hosts)
        check_origins(self.allowed_origins)
        for name in self.served_model_names:
            if not isinstance(name, str) or not name:
                raise _bad("served_model_names", name, "give names that are not empty")
        self._check_keys()
        for option in ("strict", "trust_request_chat_template", "metrics_need_key"):
            if not isinstance(getattr(self, option), bool):
                raise _bad(option, getattr(self, option), "give True or False")
        for option in ("tool_call_parser", "reasoning_parser"):
            if not isinstance(getattr(self, option), str | None):
                raise _bad(option, getattr(self, option), "give 'auto', None or the name of a format")
        choose_format(None, self.tool_call_parser, self.reasoning_parser)

    def _check_keys(self) -> None:
        """The errors must not show a key."""
        for option in ("api_keys", "admin_api_keys"):
            for key in getattr(self, option):
                if not isinstance(key, str) or not key or not key.isascii() or any(c.isspace() for c in key):
                    text = f"{option}: a key is made of ASCII characters without spaces; give another one"
                    raise ConfigError(text, option=option)
        if set(self.api_keys) & set(self.admin_api_keys):
            text = "admin_api_keys: one of them is a key of requests too; give admin calls a key of their own"
            raise ConfigError(text, option="admin_api_keys")
        if self.metrics_need_key and not (self.api_keys or self.admin_api_keys):
            text = "metrics_need_key: the service has no key; give api_keys or admin_api_keys"
            raise ConfigError(text, option="metrics_need_key")

    def _check_integer(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _bad(name, value, f"give an integer of at least {least}")

    @classmethod
    def bounds(cls) -> list[Any]:
        """The fields that are flags of the command, each described by its metadata's "option"."""
        return [f for f in fields(cls) if "option" in f.metadata]


def _bad(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{option}={value!r}: {remedy}", option=option, value=value)
