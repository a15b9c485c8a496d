"""This process as a driver of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ringcore.errors import ConfigError

__all__ = ["RayConnection", "refused"]


class RayConnection:
    """Connects to the cluster, unless this process has a connection already, which then is used and stays. What was
    started by way of it ends with it, and with this process, however that ends.

    ray: the module. environment: the runtime environment of an actor, for `options(runtime_env=...)`.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None) -> None:
        """address: "HOST:PORT" of the cluster's head, or None for `RAY_ADDRESS`, or this host's cluster. Raises
        `ConfigError`."""
        try:
            self.ray: Any = import_module("ray")
        except ImportError as error:
            text = f"executor='ray': Ray cannot be imported ({error}); run pip install 'ringcore[ray]'"
            raise ConfigError(text, option="executor", value="ray") from error
        self.environment = dict(runtime_env or {})
        self._is_own = not self.ray.is_initialized()
        if self._is_own:
            try:
                with _kept_sigterm():
                    self._connect(address, self.environment)
            except BaseException:
                self.ray.shutdown()  # it may have connected before it failed
                raise
            self.environment = {}  # the job has it, and its actors inherit it

    def _connect(self, address: str | None, runtime_env: Mapping[str, Any]) -> None:
        try:
            self.ray.init(
                address=address or "auto",
                runtime_env=dict(runtime_env),
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            raise _bad_address(address, error) from error
        except Exception as error:  # of Ray's: of its versions, of the parts of a runtime environment
            option, value = ("ray_runtime_env", runtime_env) if runtime_env else ("ray_address", address)
            raise refused(option, value, error) from error

    def environment_with(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """`environment`, with these variables where it has none of the name."""
        given = self.environment.get("env_vars", {})
        return self.environment | {"env_vars": dict(variables) | given}

    def close(self) -> None:
        """Idempotent."""
        if self._is_own:
            self._is_own = False
            self.ray.shutdown()


def refused(option: str, value: object, error: Exception) -> ConfigError:
    text = f"{option}={value!r}: Ray refuses: {type(error).__name__}: {error}"
    return ConfigError(text, option=option, value=repr(value))


def _bad_address(address: str | None, error: Exception) -> ConfigError:
    remedy = (
        "run 'ray start' on this host and give the address of the head, or None for this host's cluster; for a cluster "
        "that asks for a token set RAY_AUTH_MODE=token"
    )
    text = f"ray_address={address!r}: no Ray cluster there ({error}); {remedy}"
    return ConfigError(text, option="ray_address", value=repr(address))


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, where it may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
