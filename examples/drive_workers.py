"""Looks into a running engine and changes it, by calls to its workers.

    python examples/drive_workers.py [MODEL]

The default model is the folder that `make setup` makes.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ringcore import LLM, SamplingParams
from ringcore.errors import WorkerError
from ringcore.worker import rpc

DEFAULT_MODEL = Path("~/.cache/ringcore/smollm2-135m").expanduser()


class Extension:
    """Mixed into every worker: its methods see the worker's own attributes."""

    rank: int

    @rpc
    def divide(self, x: float, y: float) -> float:
        return x / y


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(DEFAULT_MODEL)
    sys.path.insert(0, str(Path(__file__).parent))  # where the workers find the extension
    with LLM(model, worker_extension="drive_workers.Extension", max_worker_restarts=1) as llm:
        generation = threading.Thread(
            target=llm.generate, args=("Once upon a time", SamplingParams(max_tokens=64)), kwargs={"use_tqdm": False}
        )
        generation.start()
        print("during a step:", llm.collective_rpc("stats", timeout=5)[0])
        print("health:", llm.health().state, "- memory:", llm.collective_rpc("memory", unique_reply_rank=0, timeout=5))
        print(llm.collective_rpc("stack", unique_reply_rank=0, timeout=5).splitlines()[0])
        generation.join()
        print("by an extension:", llm.collective_rpc("divide", args=(1, 4)))
        try:
            llm.collective_rpc("divide", args=(1, 0))
        except WorkerError as error:
            print(f"{error} ... on ranks {sorted(error.failures)}")


if __name__ == "__main__":
    main()
