"""Fake workers on hosts of a Ray cluster. No other test's workers import what belongs to it."""

from __future__ import annotations

from ringcore.executor.ray_cluster.executor import RayExecutor


class FakeRay(RayExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_worker")
