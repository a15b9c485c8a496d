"""GuideLLM's load generator, by its command line: every request is answered, with as many tokens as it asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]

PROMPT_TOKENS, OUTPUT_TOKENS, NUM_REQUESTS = 32, 8, 6


@pytest.fixture(scope="module", autouse=True)
def guidellm():
    pytest.importorskip("guidellm")


@pytest.mark.parametrize(
    ("path", "profile"),
    [("/v1/chat/completions", "kind=concurrent,streams=3"), ("/v1/completions", "kind=constant,rate=20")],
)
def test_a_run(service, tmp_path, path, profile):
    report = tmp_path / "report.json"
    asked = {
        "--backend": f"kind=openai_http,target={service.url},request_format={path}",
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={service.engine.config.model.model}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output": f"kind=json,path={report}",
    }
    arguments = [text for pair in asked.items() for text in pair]
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", *arguments, "--disable-console"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    answered = benchmark["requests"]["successful"]
    assert {one["output_tokens"] for one in answered} == {OUTPUT_TOKENS}
    assert all(one["prompt_tokens"] >= PROMPT_TOKENS and one["time_to_first_token_ms"] > 0 for one in answered)
