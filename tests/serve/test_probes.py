"""Probes of replicas whose answers are of different times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ringcore.protocol.messages import EngineHealth
from ringcore.serve.monitoring import add_monitoring


class Engine:
    """Replicas in these states, each time that they are asked; the last ones for ever."""

    def __init__(self, *states: tuple[str, ...]) -> None:
        self._states = list(states)
        self.num_asked = 0

    async def replica_healths(self, timeout: float = 1.0) -> list[EngineHealth]:
        states = self._states[min(self.num_asked, len(self._states) - 1)]
        self.num_asked += 1
        return [EngineHealth(state) for state in states]


def client_of(engine: Engine) -> TestClient:
    app = FastAPI()
    add_monitoring(app, SimpleNamespace(engine=engine, is_ending=False))
    return TestClient(app)


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_one_that_became_ready_while_another_was_asked_serves(path):
    """In a rolling restart the first was starting when it was asked, and the second had ended when it answered."""
    engine = Engine(("starting", "dead"), ("ready", "starting"))
    assert client_of(engine).get(path).status_code == 200
    assert engine.num_asked == 2


@pytest.mark.parametrize("states", [("starting", "dead"), ("dead",), ("starting",)])
def test_none_that_serves(states):
    answer = client_of(Engine(states)).get("/health/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, f"no engine serves: {', '.join(states)}")


def test_those_that_serve_are_asked_once():
    engine = Engine(("starting", "ready"))
    assert client_of(engine).get("/health/ready").status_code == 200
    assert engine.num_asked == 1
