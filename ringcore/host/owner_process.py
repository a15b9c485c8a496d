"""Fork safety: objects that a forked child must not use."""

from __future__ import annotations

import os
import weakref

from ringcore.errors import RingcoreError

__all__ = ["OwnerProcess"]


class OwnerProcess:
    """The process that created an object. A forked child has a copy of the object without its threads, which shares the
    parent's channels: using it would hang, or corrupt the parent's messages.

    is_here: False in a forked child; reading it costs no system call.
    """

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()
        self.is_here = True
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(me()))  # cannot be unregistered

    def check(self) -> None:
        """Raises `RingcoreError` in a forked child. Details: `owner_pid`, `pid`."""
        if not self.is_here:
            raise RingcoreError(
                f"{self._what} was made in process {self._pid} and is used in process {os.getpid()}, which was forked "
                "from it; make one there, or start the process by 'spawn'",
                owner_pid=self._pid,
                pid=os.getpid(),
            )


def _leave(owner: OwnerProcess | None) -> None:
    if owner is not None:
        owner.is_here = False
