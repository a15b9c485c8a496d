"""No process of an engine, its front end with a progress bar among them, has anything named in /dev/shm."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from process_stat import is_alive
from raw_files import model_folder
from tokenizers_made import byte_level, tokenizer_folder

SCRIPT = """
import json, multiprocessing, os, sys
multiprocessing.set_start_method("spawn")  # whose semaphores keep their names while they live
from ringcore import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", device="cpu", kv_cache_bytes=1 << 20, max_num_seqs=2)
llm.generate(["a"] * 3, SamplingParams(max_tokens=2, ignore_eos=True))
llm.generate(["a"] * 3, SamplingParams(max_tokens=2, ignore_eos=True))
print(json.dumps([os.getpid(), *llm.ready.pids.values()]), flush=True)
sys.stdin.read()
"""


def test_killed_processes_leave_no_semaphore(tmp_path):
    folder = tokenizer_folder(model_folder(tmp_path / "m", vocab_size=512, eos_token_id=None), byte_level())
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        line = script.stdout.readline()
        pids = json.loads(line or script.stderr.read())
        assert len(pids) == 3
        mapped = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in pids}
        bars = os.read(script.stderr.fileno(), 1 << 16)
    finally:
        os.killpg(script.pid, signal.SIGKILL)
        script.communicate()
    assert b"prompts: 100%" in bars
    assert [line for maps in mapped.values() for line in maps.splitlines() if "/dev/shm/" in line] == []
    assert not is_alive(pids[0])
