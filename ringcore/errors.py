"""Every error that a caller of ringcore can see, and how each crosses a process boundary.

    RingcoreError
    ├── ConfigError            (ValueError)    an engine option is wrong, alone or with another
    ├── UnknownOptionError     (TypeError)     no such engine option or sampling parameter
    ├── InvalidRequestError    (ValueError)    one request is invalid; others are not affected
    ├── QueueFullError                         a bounded queue is full (back-pressure); retry later
    ├── ModelLoadError                         the checkpoint cannot be read or does not fit the model
    ├── CapacityError                          too little memory; details have what would fit
    ├── EngineDeadError                        a process of the engine ended; every later call raises it again
    │   └── WorkerDiedError                    a worker ended under this call; the engine starts new ones
    ├── WorkerError                            a worker method raised; rank, type, message, remote traceback
    ├── PermissionDeniedError  (PermissionError)  the key of an admin client lacks the scope of its call
    ├── RpcTimeoutError        (TimeoutError)  the deadline passed; method and missing ranks
    └── SleepingError                          the call needs memory that sleep released

An error has a message for a person and `details` for a program: builtin values only, so that any of them can
be encoded, sent, and raised again on the other side as the same type with the same details.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CapacityError",
    "ConfigError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "PermissionDeniedError",
    "QueueFullError",
    "RingcoreError",
    "RpcTimeoutError",
    "SleepingError",
    "UnknownOptionError",
    "WorkerDiedError",
    "WorkerError",
    "error_from_wire",
    "error_to_wire",
    "unknown_option",
]


class RingcoreError(Exception):
    """Base of every error raised on purpose by ringcore.

    `details` holds the facts of the message as builtin values; each subclass documents its keys.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = details

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def failures(self) -> dict[int, RingcoreError]:
        """The error of each rank, by rank, if a call failed on workers; empty for any other error.

        Decoded from `details["failures"]`, a list of wire forms, each with its `rank`.
        """
        return {wire["rank"]: error_from_wire(wire) for wire in self.details.get("failures", [])}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(cls: type[RingcoreError], message: str, details: dict[str, Any]) -> RingcoreError:
    return cls(message, **details)


class ConfigError(RingcoreError, ValueError):
    """An engine option has a value that cannot work. Details: `option`, `value`."""


class UnknownOptionError(RingcoreError, TypeError):
    """A keyword that is no option. Details: `option`, `nearest` (a valid name or None)."""


class InvalidRequestError(RingcoreError, ValueError):
    """A request is invalid. Details: `field`, `value`, and `index` if it came in a batch."""


class QueueFullError(RingcoreError):
    """A bounded queue is full. Details: `num_waiting`, `limit`."""


class ModelLoadError(RingcoreError):
    """A model cannot be found, read or built. Details, those that are known: `path`, `field`, `tensor`,
    `architecture`."""


class CapacityError(RingcoreError):
    """Too little memory. Details: `needed_bytes`, `available_bytes`; of a start-up also `missing_bytes`,
    `max_model_len` that fits (0: none), `budget` (bytes by entry), and for each option whose increase would help the
    smallest sufficient value, keyed by the option's name."""


class EngineDeadError(RingcoreError):
    """A process of the engine ended. Details: `process`, `rank`, `exit_code`, `signal`, `last_log` (list of lines).

    Of a worker on another host, and of a lost host, also `host`; of hosts that did not join `hosts`.
    Of one that hung also `hung_s`, and `pid` and `process_state` or, of workers, `hung_ranks`.
    """


class WorkerDiedError(EngineDeadError):
    """A worker died during this call, and the engine replaces the workers: later calls succeed. Details: the base's."""


class RemoteTraceback(Exception):
    """The cause of a `WorkerError`: the traceback in the worker, as text."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


class WorkerError(RingcoreError):
    """A method raised in a worker. Details: `rank`, `error_type`, `error_message`, `traceback`, `method`.

    Its cause shows the traceback in the worker.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        if details.get("traceback"):
            self.__cause__ = RemoteTraceback(details["traceback"])


class PermissionDeniedError(RingcoreError, PermissionError):
    """An admin client's key may not make this call. Details: `method`, the `scope` it needs, `key` (the name), `file`
    (of the key, on the engine's host)."""


class RpcTimeoutError(RingcoreError, TimeoutError):
    """A call's deadline passed. Details: `method`, `timeout_s`, `missing_ranks`."""


class SleepingError(RingcoreError):
    """The engine sleeps and the call needs released memory. Details: `tags`."""


_WIRE_TYPES: dict[str, type[RingcoreError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        UnknownOptionError,
        InvalidRequestError,
        QueueFullError,
        ModelLoadError,
        CapacityError,
        EngineDeadError,
        WorkerDiedError,
        WorkerError,
        PermissionDeniedError,
        RpcTimeoutError,
        SleepingError,
    )
}


def error_to_wire(error: BaseException) -> dict[str, Any]:
    """An error as builtin values: `{"type", "message", "details"}`.

    A foreign type is sent by name and text, as in a `WorkerError`: see `executor.worker_proc`.
    """
    if isinstance(error, RingcoreError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    return {"type": type(error).__name__, "message": str(error), "details": {}}


def error_from_wire(wire: Mapping[str, Any]) -> RingcoreError:
    """The error that `error_to_wire` described; an unknown type becomes a `RingcoreError` that names it."""
    cls = _WIRE_TYPES.get(wire["type"])
    if cls is None:
        return RingcoreError(f"{wire['type']}: {wire['message']}", **wire["details"])
    return cls(wire["message"], **wire["details"])


def unknown_option(option: str, valid: Iterable[str], what: str) -> UnknownOptionError:
    """The error for a keyword that is not in `valid`; names the nearest one. `what` is e.g. "engine option"."""
    names = sorted(valid)
    close = difflib.get_close_matches(option, names, n=1, cutoff=0.6)
    nearest = close[0] if close else None
    remedy = f"did you mean {nearest!r}?" if nearest else f"valid names: {', '.join(names)}"
    return UnknownOptionError(f"unknown {what} {option!r}; {remedy}", option=option, nearest=nearest)
