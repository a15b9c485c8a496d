"""The wall clock may jump as it likes: nothing here is timed by it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict

from chaos_plan import VARIABLE, Plan
from scenarios import HERE, PACKAGE, child_environment

WALL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime)\(|\bfrom time import\b.*\btime\b|\bdatetime\.(utc)?now\("
)
# A template may ask for today's date, to write it into a prompt; an answer of the service, a report and a search of
# tiles have the date they were made.
TELL_THE_DATE = (
    *("checkpoint/chat_template.py", "openai_api/served_model.py", "cli/bench.py"),
    "worker/start_up/tile_search.py",
)


def test_no_source_reads_the_wall_clock():
    found = {}
    for file in (PACKAGE / "ringcore").rglob("*.py"):
        if file.as_posix().endswith(TELL_THE_DATE):
            continue
        lines = [line for line in file.read_text().splitlines() if WALL_CLOCK.search(line)]
        if lines:
            found[str(file)] = lines
    assert found == {}


def test_a_wild_clock_in_all_processes_changes_nothing(model_folder, tmp_path):
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    roles = tmp_path / "roles"
    roles.touch()
    plan = Plan("nobody-listens", str(roles), wild_clock=True)
    environment = child_environment(tmp) | {VARIABLE: json.dumps(asdict(plan))}
    command = [sys.executable, str(HERE / "wild_clock_script.py"), model_folder]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stdout)
    assert sorted(facts["wild_processes"]) == ["engine", "front end", "worker 0", "worker 1"]
    assert 0.2 <= facts["timeout_s"] < 30.0
    assert facts["close_s"] < 30.0
    assert facts["health"] == "ready"
    assert list(tmp.iterdir()) == []
