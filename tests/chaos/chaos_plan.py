"""What a scenario does to the processes of an engine, from inside them; production code has no hooks.

The environment variable RINGCORE_CHAOS holds the plan of one scenario. Each process of it reads the plan as its
interpreter starts (`in_every_process/sitecustomize.py`), writes down its pid and role, and wraps the one function at
which it shall stop: there it tells the test by a socket, and waits until it is killed or released.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import types
from dataclasses import asdict, dataclass

VARIABLE = "RINGCORE_CHAOS"
FRONT_END = "front end"
INTERPRETER = "the interpreter's start"  # a target: nothing is wrapped


@dataclass(frozen=True)
class Stop:
    """Where a process stops.

    role: of which process ("engine", "worker 0", ...). target: "module:function" or "module:Class.method".
    when: "call", "return", or "line N": before the N-th line that is executed in the target's file during the call.
    nth: which call of the process; generation: 2 for the process that replaced the first of its role.
    """

    role: str
    target: str
    when: str = "call"
    nth: int = 1
    generation: int = 1


@dataclass(frozen=True)
class Plan:
    """One scenario, for all of its processes.

    socket: an abstract address, where the test listens. roles_file: each process appends "PID ROLE".
    wild_clock: the wall clock jumps by up to an hour at each reading.
    """

    socket: str
    roles_file: str
    stop: Stop | None = None
    wild_clock: bool = False

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Plan:
        fields = json.loads(os.environ[VARIABLE])
        fields["stop"] = fields["stop"] and Stop(**fields["stop"])
        return cls(**fields)


def enter_process() -> None:
    """At the start of a child's interpreter."""
    plan, role = Plan.from_environment(), _role_of_child()
    if role is None:
        return
    generation = _write_role(plan, role)
    if plan.wild_clock:
        make_clock_wild()
    stop = plan.stop
    if stop is None or (stop.role, stop.generation) != (role, generation):
        return
    if stop.target == INTERPRETER:
        _stop_here(plan)
        return
    module = stop.target.partition(":")[0]
    sys.meta_path.insert(0, _WhenImported(module, lambda: _wrap_target(plan)))


def enter_front_end(plan: Plan):
    """In the front end, whose modules are imported already. Returns what undoes it."""
    _write_role(plan, FRONT_END)
    if plan.wild_clock:
        make_clock_wild()
    if plan.stop is None or plan.stop.role != FRONT_END:
        return lambda: None
    importlib.import_module(plan.stop.target.partition(":")[0])
    return _wrap_target(plan)


def _role_of_child() -> str | None:
    """The name that a child of ours is started with; None for any other process."""
    try:
        return json.loads(os.pread(int(sys.orig_argv[-1]), 1 << 20, 0).partition(b"\n")[0])["name"]
    except (ValueError, OSError, KeyError, TypeError):
        return None


def _write_role(plan: Plan, role: str) -> int:
    """How many of this role there have been, with this one."""
    with open(plan.roles_file, "a") as roles:
        roles.write(f"{os.getpid()} {role}\n")
    return sum(found == role for _, found in read_roles(plan.roles_file))


def read_roles(path: str) -> list[tuple[int, str]]:
    """(pid, role) of every process so far, oldest first."""
    found = []
    with open(path) as roles:
        for line in roles:
            pid, _, role = line.rstrip("\n").partition(" ")
            found.append((int(pid), role))
    return found


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `then` as soon as a module has been executed, before any importer sees it."""

    def __init__(self, module: str, then) -> None:
        self._module, self._then = module, then

    def find_spec(self, fullname, path, target=None):
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._then()

        spec.loader.exec_module = exec_module
        return spec


def _wrap_target(plan: Plan):
    module_name, _, path = plan.stop.target.partition(":")
    *outer, name = path.split(".")
    holder = sys.modules[module_name]
    for part in outer:
        holder = getattr(holder, part)
    found = vars(holder)[name]
    function = found.__func__ if isinstance(found, classmethod) else found
    assert isinstance(function, types.FunctionType), plan.stop.target
    wrapped = _stopping(function, plan)
    setattr(holder, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)
    return lambda: setattr(holder, name, found)


def _stopping(function, plan: Plan):
    stop, lock, calls = plan.stop, threading.Lock(), [0]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with lock:
            calls[0] += 1
            is_it = calls[0] == stop.nth
        if not is_it:
            return function(*args, **kwargs)
        if stop.when == "call":
            _stop_here(plan)
            return function(*args, **kwargs)
        try:
            if stop.when.startswith("line "):
                return _stop_at_line(plan, int(stop.when.removeprefix("line ")), function, args, kwargs)
            value = function(*args, **kwargs)
        except Exception:  # a call that does not come to its end, such as the try of a record that is too large
            calls[0] = stop.nth - 1
            raise
        _stop_here(plan)
        return value

    return wrapper


def _stop_at_line(plan: Plan, line: int, function, args, kwargs):
    """Stops before the line-th executed line, or at the end of a call that is shorter."""
    left = [line]

    def trace(frame, event, arg):
        if frame.f_code.co_filename != function.__code__.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                _stop_here(plan)
                return None
        return trace

    sys.settrace(trace)
    try:
        value = function(*args, **kwargs)
    finally:
        sys.settrace(None)
    if left[0] > 0:
        _stop_here(plan)
    return value


_has_stopped = threading.Event()


def _stop_here(plan: Plan) -> None:
    """Tells the test, and waits until it is released; a test that is gone releases everybody. Once in a process."""
    import socket

    if plan.stop.role != FRONT_END:
        if _has_stopped.is_set():
            return
        _has_stopped.set()
    with socket.socket(socket.AF_UNIX) as to_test:
        try:
            to_test.connect("\0" + plan.socket)
            to_test.sendall(b"%d" % os.getpid())
            to_test.recv(1)
        except OSError:
            return


def make_clock_wild() -> None:
    """From here on the wall clock jumps by up to an hour at each reading, forth and back; monotonic clocks do not."""
    import random
    import time

    real_time, rng = time.time, random.Random(os.getpid())
    time.time = lambda: real_time() + rng.uniform(-3600, 3600)
    time.time_ns = lambda: int(time.time() * 1e9)
