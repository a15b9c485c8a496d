"""Admin calls over HTTP, to two replicas: what each does, what it answers, and what a failure leaves."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from fake_engine import SLOW, FragileUniproc, expected, make_model_folder
from running_service import DEADLINE_S, eventually, http, served

import ringcore
from ringcore.errors import CapacityError
from ringcore.params.vllm_api import DIFFERENT_ENDPOINTS, ENDPOINTS
from ringcore.serve.access import ADMIN_PATHS
from ringcore.serve.admin import endpoints, json_values, replica_answers

KEY, DATA_KEY = "admin-key", "data-key"
ENGINES = {"executor": FragileUniproc, "data_parallel_size": 2, "routing": "round-robin"}
BOTH = [{"replica": 0}, {"replica": 1}]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    with served(folder, ENGINES, served_model_names=("fake",), api_keys=(DATA_KEY,), admin_api_keys=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def admin(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture(autouse=True)
def _resumed(request):
    """A test that fails while the engine is paused or asleep fails alone."""
    yield
    if "admin" in request.fixturenames:
        admin = request.getfixturevalue("admin")
        for path in ("/wake_up", "/resume"):
            good(admin.post(path))


def completed(service, prompt=(97,), num_tokens=4, **body) -> httpx.Response:
    body = {"prompt": list(prompt), "max_tokens": num_tokens} | body
    headers = {"Authorization": f"Bearer {DATA_KEY}"}
    return http.post(f"{service.url}/v1/completions", json=body, headers=headers)


def text(prompt, num_tokens, weights=0) -> str:
    return bytes(expected(list(prompt), num_tokens, weights)).decode()


class Running:
    """A request in a thread of its own, and its answer."""

    def __init__(self, service, *args, **body) -> None:
        self._thread = threading.Thread(target=lambda: setattr(self, "answer", completed(service, *args, **body)))
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(DEADLINE_S)
        return self.answer


def good(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()


def finish_reason(running: Running) -> str:
    return good(running.result())["choices"][0]["finish_reason"]


def test_the_paths_of_the_gate_are_those_of_the_routes(service, admin):
    routes = service.service_app.routes
    assert {one.path for one in routes if one.endpoint.__module__ == endpoints.__name__} == ADMIN_PATHS
    answer = admin.get("/sleep")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")


def test_vllms_endpoints_are_here_or_explained(service):
    routes = {f"{method} {one.path}" for one in service.service_app.routes for method in one.methods}
    theirs = set(json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())["endpoints"])
    assert theirs - routes == set(ENDPOINTS)
    assert set(DIFFERENT_ENDPOINTS) <= theirs & routes
    named = {
        f"{method} {path}" for text in ENDPOINTS.values() for method, path in re.findall(r"(GET|POST) (/\S+)", text)
    }
    assert named <= routes


def test_a_key_of_requests_opens_none(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {DATA_KEY}"}) as client:
        for path in ADMIN_PATHS:
            answers = client.get(path), client.post(path)
            assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(401, "invalid_api_key")] * 2


def test_sleep_and_wake_up(service, admin):
    assert good(admin.get("/is_sleeping")) == {
        "is_sleeping": False,
        "replicas": [one | {"is_sleeping": False} for one in BOTH],
    }
    answer = good(admin.post("/sleep?level=1"))
    assert [one["replica"] for one in answer["replicas"]] == [0, 1]
    assert answer["replicas"][1]["states"] == {"weights": "offloaded", "kv_cache": "discarded"}
    assert answer["replicas"][1]["ranks"][0]["copied_bytes"] == 10.0
    assert good(admin.get("/is_sleeping"))["is_sleeping"]
    refused = completed(service)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_sleeping")
    good(admin.post("/wake_up", params={"tags": ["weights"]}))
    assert good(admin.get("/is_sleeping"))["is_sleeping"]
    good(admin.post("/wake_up?tags=kv_cache"))
    assert good(completed(service))["choices"][0]["text"] == text([97], 4)


def test_new_weights_from_the_disk(service, admin):
    answer = good(admin.post("/reload_weights", json={"path": "/weights/3"}))
    assert [one["states"]["weights"] for one in answer["replicas"]] == ["resident"] * 2
    assert {good(completed(service))["choices"][0]["text"] for _ in range(4)} == {text([97], 4, weights=3)}
    good(admin.post("/start_weight_update"))
    assert completed(service).status_code == 503
    good(admin.post("/update_weights", json={"path": "/weights/0"}))
    good(admin.post("/finish_weight_update"))
    assert {good(completed(service))["choices"][0]["text"] for _ in range(4)} == {text([97], 4)}


def test_a_failure_says_which_replica_has_done_it(service, admin):
    failing = service.engine.replica(1)
    service.call(failing.pause())
    slow = Running(service, [SLOW, 1], 120)
    other = Running(service, [SLOW, 2], 120)
    eventually(lambda: len(service.engine.unfinished_ids) == 2, "both are sent")
    with service.hurried():
        answer = admin.post("/sleep?level=0&mode=wait")
    assert answer.status_code == 400
    error, replicas = answer.json()["error"], answer.json()["replicas"]
    assert error["message"].startswith("replica 1: mode='wait': 1 requests are unfinished and the engine is paused")
    assert replicas == [{"replica": 0}, {"replica": 1, "error": error | {"message": error["message"][11:]}}]
    assert good(admin.get("/is_paused"))["replicas"] == [
        {"replica": 0, "is_paused": False, "state": "sleeping"},
        {"replica": 1, "is_paused": True, "state": "ready"},
    ]
    good(admin.post("/wake_up"))
    good(admin.post("/resume"))
    with service.hurried():
        assert {slow.result().status_code, other.result().status_code} == {200}


def test_pause_keeps_what_runs(service, admin):
    running = Running(service, [SLOW, 5], 120)
    eventually(lambda: service.engine.stats.num_running == 1, "it runs")
    assert good(admin.post("/pause?mode=keep"))["status"] == "paused"
    assert good(admin.get("/is_paused"))["is_paused"]
    assert http.get(f"{service.url}/health/ready").status_code == 503
    assert good(admin.post("/resume")) == {"status": "resumed", "replicas": BOTH}
    with service.hurried():
        assert good(running.result())["choices"][0]["text"] == text([SLOW, 5], 120)


def test_pause_waits_for_what_runs(service, admin):
    running = Running(service, [SLOW, 6], 120)
    eventually(lambda: service.engine.stats.num_running == 1, "it runs")
    answer = admin.post("/pause?mode=wait&timeout=0.001")
    assert answer.status_code == 504
    assert "1 requests still run after 0.001 s" in answer.json()["error"]["message"]
    with service.hurried():
        assert [one["has_cleared_cache"] for one in good(admin.post("/pause?mode=wait"))["replicas"]] == [True, True]
    assert good(running.result())["usage"]["completion_tokens"] == 120
    good(admin.post("/resume"))


def test_pause_aborts_and_what_comes_later_waits(service, admin):
    running = Running(service, [SLOW, 7], 120)
    eventually(lambda: service.engine.stats.num_running == 1, "it runs")
    good(admin.post("/pause?clear_cache=false"))
    assert finish_reason(running) == "abort"
    later = Running(service, num_tokens=3)
    eventually(lambda: len(service.engine.unfinished_ids) == 1, "the later one waits")
    good(admin.post("/resume"))
    assert good(later.result())["choices"][0]["text"] == text([97], 3)


def test_abort_requests(service, admin):
    slow = [Running(service, [SLOW, i], 120, request_id=f"r{i}") for i in range(3)]
    eventually(lambda: len(service.engine.unfinished_ids) == 3, "all are sent")
    answer = good(admin.post("/abort_requests", json={"request_ids": ["cmpl-r1", "cmpl-unknown"]}))
    assert answer == {"status": "aborted", "aborted": 1, "request_ids": ["cmpl-r1-0"]}
    assert finish_reason(slow[1]) == "abort"
    assert good(admin.post("/abort_requests"))["aborted"] == 2
    assert {finish_reason(one) for one in slow} == {"abort"}
    eventually(lambda: not service.engine.unfinished_ids, "all have ended")


def test_reset_prefix_cache(service, admin):
    replicas = good(admin.post("/reset_prefix_cache?reset_running_requests=true"))["replicas"]
    assert replicas == [one | {"has_reset": True} for one in BOTH]


def test_calls_of_the_workers(admin):
    body = {"method": "echo", "args": ["x"], "kwargs": {"times": 2}}
    assert good(admin.post("/collective_rpc", json=body)) == {
        "results": ["0:xx", "0:xx"],
        "replicas": [one | {"num_results": 1} for one in BOTH],
    }
    assert good(admin.post("/collective_rpc", json=body | {"unique_reply_rank": 0}))["results"] == ["0:xx", "0:xx"]
    failed = admin.post("/collective_rpc", json={"method": "fail"})
    assert failed.status_code == 500
    assert "no such thing" in failed.json()["error"]["message"]
    assert [one["replica"] for one in failed.json()["replicas"] if "error" in one] == [0, 1]
    assert admin.post("/collective_rpc", json={"method": "execute_model"}).status_code == 400
    assert good(admin.get("/get_world_size")) == {"world_size": 2}
    assert good(admin.get("/get_world_size?include_dp=false")) == {"world_size": 1}


def test_a_slow_call_blocks_nothing_and_ends(service, admin):
    answer = admin.post("/collective_rpc", json={"method": "nap", "args": [DEADLINE_S], "timeout": 0.05})
    assert answer.status_code == 504
    with service.hurried():
        assert http.get(f"{service.url}/health").status_code == 200
        assert good(completed(service))["choices"][0]["text"] == text([97], 4)


def test_too_many_calls(service, admin, monkeypatch):
    monkeypatch.setattr(replica_answers, "_MAX_IN_FLIGHT", 0)
    answer = admin.get("/is_sleeping")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_a_profile_of_all_replicas(service, admin):
    assert admin.post("/stop_profile").status_code == 400
    assert good(admin.post("/start_profile?seconds=30")) == {"replicas": BOTH}
    again = admin.post("/start_profile")
    assert again.status_code == 400
    assert "another trace is recorded" in again.json()["error"]["message"]
    for _ in range(2):
        completed(service).raise_for_status()
    file = good(admin.post("/stop_profile"))
    names = {event["args"]["name"]: event["pid"] for event in file["traceEvents"] if event["name"] == "process_name"}
    processes = [name.partition(" (")[0] for name in names]
    of_one = ["front end", "engine", "worker 0", "requests"]
    assert sorted(processes) == sorted(f"replica {i}: {one}" for i in range(2) for one in of_one)
    assert len(set(names.values())) == 8
    requests = {event["id"] for event in file["traceEvents"] if event["name"] == "request" and event["ph"] == "b"}
    assert requests == {"replica 0: 0", "replica 1: 0"}
    spans = {event["pid"] for event in file["traceEvents"] if event["ph"] == "X" and event["name"] == "schedule"}
    assert spans == {pid for name, pid in names.items() if "engine" in name}
    assert admin.post("/stop_profile").status_code == 400


def test_server_info(admin):
    info = good(admin.get("/server_info"))
    assert info["version"] == ringcore.__version__
    assert info["config"]["max_model_len"] == 128
    assert info["served_model_names"] == ["fake"]
    assert [one["state"] for one in info["replicas"]] == ["ready", "ready"]
    assert info["service"]["max_n"] == 16
    assert KEY not in str(info)
    assert DATA_KEY not in str(info)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=3", None, "level"),
        ("/sleep?mode=now", None, "mode"),
        ("/sleep?levels=1", None, "levels"),
        ("/sleep?timeout=0", None, "timeout"),
        ("/sleep?timeout=nan", None, "timeout"),
        ("/wake_up?tags=weight", None, "tags[0]"),
        ("/pause?mode=new", None, "mode"),
        ("/start_profile?seconds=601", None, "seconds"),
        ("/reload_weights", {"path": "weights"}, "path"),
        ("/reload_weights", {"path": "/a\x00b"}, "path"),
        ("/update_weights", {"update_info": {}}, "path"),
        ("/collective_rpc", {"method": ""}, "method"),
        ("/collective_rpc", {"method": "nothing_of_it"}, "method"),
        ("/collective_rpc", {"method": "echo", "unique_reply_rank": 9}, "unique_reply_rank"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids"),
    ],
)
def test_what_is_wrong(admin, path, body, param):
    answer = admin.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_lost_engine_and_a_full_host(service, admin, monkeypatch):
    """The error of an engine is the answer's, by its own status."""

    async def no_memory(*args):
        raise CapacityError("the host has 1 byte free", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(service.engine.replica(0), "sleep", no_memory)
    monkeypatch.setattr(service.engine.replica(1), "sleep", no_memory)
    answer = admin.post("/sleep")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "replica 0: the host has 1 byte free"


def test_arrays_are_lists_within_a_bound(service, monkeypatch):
    import numpy as np

    from ringcore import HostTensor
    from ringcore.errors import InvalidRequestError

    values = {"a": np.eye(2, dtype=np.int8), "t": HostTensor("bfloat16", (1,), b"\x80\x3f"), "c": 1 + 2j}
    assert json_values.json_of_values(values) == b'{"a":[[1,0],[0,1]],"t":[1.0],"c":[1.0,2.0]}'
    with pytest.raises(InvalidRequestError, match="float8_e5m2, which is no number of JSON"):
        json_values.json_of_values(HostTensor("float8_e5m2", (1,), b"\x00"))
    monkeypatch.setattr(json_values, "_MAX_ELEMENTS", 3)
    with pytest.raises(InvalidRequestError, match="an array of 4 numbers, and JSON takes 3"):
        json_values.json_of_values(values)
