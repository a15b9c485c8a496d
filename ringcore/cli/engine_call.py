"""A call of `ringcore rpc`, to the workers of an engine or to the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ringcore.errors import InvalidRequestError, PermissionDeniedError, RingcoreError, RpcTimeoutError

if TYPE_CHECKING:
    from ringcore.front_end.admin_client import AdminClient
    from ringcore.front_end.local_engines import LocalEngine

__all__ = ["EngineCall", "explained"]


class EngineCall(NamedTuple):
    """args: each JSON, or else a string. rank: only this one replies. of_engine: never to the workers."""

    method: str
    args: Sequence[str]
    timeout_s: float
    rank: int | None = None
    of_engine: bool = False

    def on(self, client: AdminClient) -> dict[int | None, Any]:
        """The value of each rank; rank None: the engine's own. Raises `RingcoreError`."""
        if self.rank is not None and self.of_engine:
            remedy = "only calls to workers have one; leave it out"
            raise InvalidRequestError(f"rank={self.rank}: {remedy}", field="rank", value=self.rank)
        args = [_argument(one) for one in self.args]
        if self.of_engine or (self.rank is None and self._is_of_engine_alone(client)):
            return {None: client.call_engine(self.method, args, None, self.timeout_s)}
        values = client.collective_rpc(self.method, args, None, self.timeout_s, self.rank)
        return dict(enumerate(values)) if self.rank is None else {self.rank: values}

    def _is_of_engine_alone(self, client: AdminClient) -> bool:
        """Whether the engine has such a method, and its workers have none."""
        from ringcore.engine_core.admin.operator_calls import OPERATOR_CALLS
        from ringcore.engine_core.admin.public_methods import ENGINE_CALLS

        if self.method in ENGINE_CALLS or self.method in OPERATOR_CALLS:
            with suppress(PermissionDeniedError):  # without the scope "read" the engine says itself where the method is
                known = client.methods(self.timeout_s)
                return not any((one.target, one.name) == ("workers", self.method) for one in known)
        return False


def explained(error: RingcoreError, engine: LocalEngine | None) -> RingcoreError:
    """A timeout, with what is known of an engine on this host that does not answer."""
    from ringcore.front_end.engine_survey import silence

    if engine is None or not isinstance(error, RpcTimeoutError) or (known := silence(engine)) is None:
        return error
    return RpcTimeoutError(f"{error.message}; it is {known[0]}: {known[1]}", **error.details)


def _argument(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
