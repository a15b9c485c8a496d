"""The server of `CompileProcesses`, and the processes that it forks, one for each socket."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Sequence

import msgspec
import triton.experimental.gluon  # noqa: F401  (with the front ends, before the processes are forked)
from triton import JITFunction
from triton.backends.nvidia import driver

from ringcore.host.interpreter import die_with
from ringcore.kernels.launch.compile_processes import MAX_MESSAGE_BYTES, CompileRequest
from ringcore.kernels.launch.precompile import Variant, hash_compiler
from ringcore.kernels.launch.target_only import compile_for

__all__ = ["serve"]

_log = logging.getLogger(__name__)


def serve(fds: Sequence[int], parent: int) -> None:
    """Forks a process for each socket, and ends when they have; when one ended otherwise than by a closed socket, it
    ends them all."""
    die_with(parent)
    hash_compiler()
    own, children = os.getpid(), set[int]()
    for fd in fds:
        child = os.fork()
        if child == 0:
            die_with(own)
            for other in fds:
                if other != fd:
                    os.close(other)
            with socket.socket(fileno=fd) as channel:
                _compile_all(channel)
            os._exit(0)
        children.add(child)
    for fd in fds:
        os.close(fd)
    while children:
        child, status = os.wait()
        if status:
            _log.warning("a process that compiles kernels ended with status %d", status)
            os._exit(1)  # which kills the others
        children.discard(child)


def _compile_all(channel: socket.socket) -> None:
    """Answers each request by a byte: whether it is compiled."""
    while message := channel.recv(MAX_MESSAGE_BYTES):
        try:
            _compile(msgspec.msgpack.decode(message, type=CompileRequest))
        except Exception as error:  # the process that asked compiles it, and raises what that raises
            _log.debug("not compiled: %r", error)
            channel.send(b"\0")
        else:
            channel.send(b"\1")


def _compile(request: CompileRequest) -> None:
    compile_for(*request.target)
    kernel = getattr(importlib.import_module(request.module), request.name)
    compiled = Variant(kernel, request.specialization).compile(load=False)
    if isinstance(kernel, JITFunction) and hasattr(driver, "make_launcher"):  # before 3.7 Triton compiles launchers too
        driver.CudaLauncher(compiled.src, compiled.metadata)
