"""A trainer in a process of its own: it tells its port, then broadcasts the tensors of a file, or fewer and dies.

python trainer_process.py FILE WORLD_SIZE [TENSORS_BEFORE_DEATH]
"""

from __future__ import annotations

import os
import signal
import sys

from safetensors.torch import load_file

from ringcore.weights import WeightGroup


def main(file: str, world_size: str, before_death: str | None = None) -> None:
    state = load_file(file)
    with WeightGroup("127.0.0.1", 0, int(world_size), "gloo", timeout_s=20) as group:
        print(group.port, flush=True)
        group.connect()
        if before_death is not None:
            names = list(state)[: int(before_death)]
            group.broadcast({name: state[name] for name in names})
            os.kill(os.getpid(), signal.SIGKILL)
        group.broadcast(state)
        print("sent", flush=True)
        sys.stdin.read()  # until the test has seen what it wants


if __name__ == "__main__":
    main(*sys.argv[1:])
