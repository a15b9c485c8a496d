"""Reads what transformers' models export in a process of its own, while a worker imports torch: on a first start, when
nothing is kept, building the model would begin by reading all their files, which takes about a second."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading

from ringcore.checkpoint import TransformersSpec
from ringcore.config import EngineConfig
from ringcore.host.import_structure import has_import_structure
from ringcore.host.interpreter import import_path, interpreter_flags
from ringcore.host.own_process import is_own_process

__all__ = ["begin_reading_names"]

_BOOT = """\
import json, sys
header = json.loads(sys.argv[1])
sys.path[:] = header["path"]
from ringcore.host.interpreter import die_with
die_with(header["parent"])
from ringcore.host.import_structure import keep_import_structure
keep_import_structure()
"""
_log = logging.getLogger(__name__)


def begin_reading_names(config: EngineConfig, rank: int) -> None:
    """The first rank of a host does, where the model's modules are transformers'; not in an application's own process,
    which imports transformers as it always is. Who needs the names while they are read waits for the lock of their
    file, and reads them itself if this process failed."""
    is_by_transformers = isinstance(config.model.spec, TransformersSpec)
    is_wanted = is_by_transformers and is_own_process() and not config.parallel.layout.local_rank(rank)
    if not is_wanted or has_import_structure():
        return
    header = json.dumps({"path": import_path(), "parent": os.getpid()})
    command = [sys.executable, *interpreter_flags(), "-c", _BOOT, header]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        _log.warning("names of transformers' models are read by the worker: %s", error)
        return
    threading.Thread(target=process.wait, name="reading-names", daemon=True).start()
