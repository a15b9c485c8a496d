"""An engine process as its client has it: one that it started, or one that was handed over to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ringcore.config import EngineConfig
from ringcore.engine_core.process import CHANNEL, ENTRY, STATUS, EngineStart
from ringcore.engine_core.transport.channel import channel_pair
from ringcore.executor.adopted_process import HandedOver
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.status_board import create_board
from ringcore.protocol.codec import encode_start

__all__ = ["NUM_FDS", "EngineEnds", "start_engine_process"]

NUM_FDS = len(HandedOver._fields) + 2  # of an engine process that is handed over


class EngineEnds(NamedTuple):
    """An engine process, this side's end of its socket, and the memory of its status line."""

    process: ChildProcess
    channel: socket.socket
    status_fd: int

    @classmethod
    def received(cls, pid: int, fds: Sequence[int]) -> EngineEnds:
        """Of an engine process that another one has handed over, with `NUM_FDS` descriptors."""
        *of_process, channel_fd, status_fd = fds
        return cls(
            ChildProcess.adopt("engine", pid, HandedOver(*of_process)), socket.socket(fileno=channel_fd), status_fd
        )


def start_engine_process(config: EngineConfig, can_be_handed_over: bool) -> EngineEnds:
    """Raises `RingcoreError`, `CapacityError`. can_be_handed_over: see `EngineConnection.hand_over`."""
    ours, theirs = channel_pair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        status_fd = create_board(1)
        undo.callback(os.close, status_fd)
        process = ChildProcess.start(
            "engine",
            ENTRY,
            encode_start(EngineStart(config)),
            {CHANNEL: theirs.fileno(), STATUS: status_fd},
            can_be_handed_over=can_be_handed_over,
        )
        undo.pop_all()
        return EngineEnds(process, ours, status_fd)
