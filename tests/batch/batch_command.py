"""`ringcore batch` as a process."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_S = 120.0
FAKE = ["--load-format", "dummy", "--max-model-len", "128", "--no-progress"]
INSTANT, PACED = (["--executor", name] for name in ("ringcore.testing:FakeExecutor", "batch_executors:Paced"))


def start(*args: object, max_file_bytes: int | None = None) -> subprocess.Popen:
    """max_file_bytes: a write beyond fails, as on a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    return subprocess.Popen(
        [sys.executable, "-m", "ringcore.cli", "batch", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        preexec_fn=None if max_file_bytes is None else limit,
    )


def ends(process: subprocess.Popen) -> tuple[int, str]:
    """(exit code, stderr); nothing goes to stdout."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out == ""
    assert "Traceback" not in err, err
    return process.returncode, err


def plain_lines(num: int) -> list[dict]:
    """Greedy ones, seeded ones, and ones that leave it to the job; of many lengths."""
    kinds = [{"temperature": 0}, {"seed": 7}, {}]
    return [
        {"custom_id": f"id-{i}", "prompt": f"{i % 5} is what {i} begins with", "max_tokens": 1 + i % 17} | kinds[i % 3]
        for i in range(num)
    ]


def openai_lines(num: int) -> list[dict]:
    lines = []
    for line in plain_lines(num):
        custom_id, prompt = line.pop("custom_id"), line.pop("prompt")
        is_chat = len(lines) % 2
        body = line | ({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt})
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        lines.append({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
    return lines


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read_results(data: bytes) -> list[dict]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def lasting(data: bytes) -> bytes:
    """Results in one order, without what depends on when they were made: the date, and what was cached."""
    results = read_results(data)
    for result in results:
        response = result.get("response")
        if response is not None and response["status_code"] == 200:
            del response["body"]["created"], response["body"]["usage"]["prompt_tokens_details"]
    return b"\n".join(sorted(json.dumps(result, sort_keys=True).encode() for result in results))
