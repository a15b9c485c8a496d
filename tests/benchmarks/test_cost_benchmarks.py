"""What metrics cost, and what the client of `ringcore bench` can take: small runs of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.bench_client_ringcore import BenchClient
from benchmarks.peers.metrics_ringcore import MetricsChild
from ringcore.testing.models import write_model_config


def test_the_load_client_reads_every_event() -> None:
    flat_out = BenchClient().stream(num_streams=8, num_events=5, interval_s=0.0)
    assert [name for name, _, _ in flat_out] == ["events", "of the client's CPU"]
    paced = {name: value for name, _, value in BenchClient().stream(num_streams=4, num_events=5, interval_s=0.02)}
    assert paced["ITL, p50"] > 15
    assert paced["events"] < 4 / 0.02 * 1.5


@pytest.mark.long_form
def test_engines_with_metrics_and_without(tmp_path: Path) -> None:
    write_model_config(tmp_path, vocab_size=1000, max_position_embeddings=4096)
    child = MetricsChild()
    child.load(str(tmp_path), {})
    rows = child.compare(num_requests=2, num_tokens=40, num_pairs=2)
    assert [unit for _, unit, _ in rows] == ["µs", "µs", "%"] * 2
    assert all(value > 0 for _, unit, value in rows if unit == "µs")
    assert all(0 < value < 1000 for _, _, value in child.observers(2))
