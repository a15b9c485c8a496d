"""Numbers of config.json that are wrong in every way: a typed error, or a model that loads, within bounded memory."""

import subprocess
import sys
from pathlib import Path

from raw_files import model_folder
from tokenizers_made import byte_level, tokenizer_folder

# One process for all: what the limit leaves beside torch would hold none of the sizes that are refused.
SCRIPT = """
import json, random, resource, sys
from pathlib import Path

import torch

from ringcore.config import EngineConfig
from ringcore.front_end.start_checks import check_start
from ringcore.errors import RingcoreError
from ringcore.host.resources import Host
from ringcore.worker.worker import Worker

folder, seed, num_runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = json.loads((folder / "config.json").read_text())
ropes = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
]
numbers = [0, 1, 2, 3, 7, -1, 1e-300, 1e300, 0.5, 4096, 2**17, 2**20, 2**27, 2**31, 10**9, 2**53, 2**63, 2**64,
           10**30, 10**400, -(10**400), "64", "x" * 1000, True, None, [], [1], [[[2]]], {}, {"a": {"b": 10**9}}]
raw = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100000]

Host.free_memory_bytes = lambda host: 32 << 20
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))

def load():
    options = dict(device="cpu", load_format="dummy", dtype="float32", max_num_batched_tokens=64, max_num_seqs=4)
    config = EngineConfig.from_options(model=str(folder), kv_cache_bytes=1 << 20, **options)
    check_start(config)
    worker = Worker(config, 0, None)
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    worker.shutdown()

draw = random.Random(seed)
loaded = 0
for run in range(num_runs):
    changed = dict(config)
    if draw.random() < 0.4:
        changed["rope_scaling"] = dict(draw.choice(ropes))
    for _ in range(draw.choice((1, 1, 2))):
        target = changed.get("rope_scaling", changed) if draw.random() < 0.5 else changed
        keys = [key for key, value in target.items() if isinstance(value, (int, float))]
        target[draw.choice(keys or ["factor"])] = draw.choice(numbers)
    text = json.dumps(changed)
    if draw.random() < 0.2:
        text = text.replace(": 32", f": {draw.choice(raw)}")
    (folder / "config.json").write_text(text)
    try:
        load()
        loaded += 1
    except RingcoreError:
        pass
    except BaseException as error:
        sys.exit(f"run {run} of seed {seed}: {type(error).__name__}: {error}: {text[:2000]}")
print(loaded)
"""
SIZES = {"head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}


def test_wrong_numbers_are_typed_errors_within_bounded_memory(tmp_path: Path, is_long: bool) -> None:
    num_runs = 20_000 if is_long else 120
    folder = tokenizer_folder(model_folder(tmp_path / "m", vocab_size=512, **SIZES), byte_level())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), "7", str(num_runs)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < int(done.stdout) < num_runs
