"""OpenTelemetry spans of requests: of a service, over HTTP, and of an embedder's engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_engine import ROW_FAILS, make_model_folder
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running_service import OPTIONS, eventually, http, served

from ringcore import LLM, AsyncEngine, SamplingParams
from ringcore.cli import main
from ringcore.errors import ConfigError
from ringcore.front_end import request_spans
from ringcore.serve.otlp import otlp_provider, spans_to

PARTS = ["arrival", "queue", "prefill", "decode", "text"]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A provider, and what it was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def requests(self, number=1):
        """The spans of so many requests, each with its parts in order; then there are none."""

        def found():
            return [one for one in self.exporter.get_finished_spans() if one.name == "llm_request"]

        eventually(lambda: len(found()) >= number, f"the spans of {number} requests")
        spans, requests = self.exporter.get_finished_spans(), found()
        self.exporter.clear()
        parts = defaultdict(list)
        for span in spans:
            if span.parent is not None:
                parts[span.parent.span_id].append(span)
        return [(one, sorted(parts[one.context.span_id], key=lambda part: part.start_time)) for one in requests]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spans():
    return Spans()


@pytest.fixture(scope="module")
def service(folder, spans):
    with served(folder, {"tracer_provider": spans.provider}, served_model_names=("fake",)) as running:
        yield running


def post(service, path="/v1/completions", headers=None, **body):
    return http.post(service.url + path, json=body, headers=headers)


def test_a_request_by_its_parts(service, spans):
    before_ns = time.time_ns()
    answer = post(service, prompt="abc", max_tokens=5, temperature=0.5).json()
    after_ns = time.time_ns()
    ((request, parts),) = spans.requests()
    assert [part.name for part in parts] == PARTS
    assert [part.attributes["ringcore.process"] for part in parts] == [
        "front end", "engine", "workers", "workers", "front end"
    ]  # fmt: skip
    ends = [request.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == ends[:-1]  # without a gap
    assert ends[-1] == request.end_time
    assert before_ns - 10**6 <= request.start_time <= request.end_time <= after_ns + 10**6
    attributes = dict(request.attributes)
    assert attributes["gen_ai.response.id"] == f"{answer['id']}-0"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert (attributes["gen_ai.request.temperature"], attributes["gen_ai.request.max_tokens"]) == (0.5, 5)
    for prompt, generated in (("input", "output"), ("prompt", "completion")):
        assert attributes[f"gen_ai.usage.{prompt}_tokens"] == 3
        assert attributes[f"gen_ai.usage.{generated}_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    latencies = ("queue", "model_prefill", "model_decode")
    queue, prefill, decode = (attributes[f"gen_ai.latency.time_in_{name}"] for name in latencies)
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(queue + prefill)
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(queue + prefill + decode)
    assert request.kind.name == "SERVER"
    assert request.parent is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_parent_is_the_callers(service, spans, stream):
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
    post(
        service,
        "/v1/chat/completions",
        headers,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=2,
        stream=stream,
    ).raise_for_status()
    ((request, parts),) = spans.requests()
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == SPAN_ID
    assert request.context.trace_state["vendor"] == "1"
    assert {part.context.trace_id for part in parts} == {request.context.trace_id}
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.usage.output_tokens"] == 2


def test_a_header_that_is_none(service, spans):
    assert post(service, headers={"traceparent": "00-zz-1-01"}, prompt="a", max_tokens=1).status_code == 200
    ((request, _),) = spans.requests()
    assert request.parent is None


def test_a_request_that_fails_and_one_with_several_completions(service, spans):
    assert post(service, prompt=[97, ROW_FAILS]).status_code == 500
    ((request, parts),) = spans.requests()
    assert request.status.status_code.name == "ERROR"
    assert request.attributes["error.type"]
    assert [part.name for part in parts] == PARTS[:3]
    post(service, prompt="ab", n=3, max_tokens=2)
    ((request, _),) = spans.requests()
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


def test_a_reader_that_leaves(service, spans):
    async def leave() -> None:
        async for _ in service.engine.generate("abc", SamplingParams(max_tokens=100, output_kind="delta")):
            break

    service.call(leave())
    ((request, _),) = spans.requests()
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_blocking_calls(folder, spans):
    with LLM(folder, tracer_provider=spans.provider, **OPTIONS) as llm:
        with spans.provider.get_tracer("mine").start_as_current_span("job") as job:
            llm.generate(["abc", "de"], SamplingParams(max_tokens=2), use_tqdm=False)
        requests = spans.requests(2)
        assert [request.parent.span_id for request, _ in requests] == [job.get_span_context().span_id] * 2
        assert [[part.name for part in parts] for _, parts in requests] == [PARTS] * 2
        stream = llm.stream(["abc"], SamplingParams(max_tokens=100), by="token")
        next(stream)
        stream.close()
        ((request, _),) = spans.requests()
        assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


# ---------------------------------------------------------------------------------------------------------------
# Exporters.


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def receiver():
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.received = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def complete(folder, provider, number):
    """Seconds that so many requests take, one after the other; without the start."""
    options = OPTIONS | {"executor": "ringcore.testing:FakeExecutor"}
    async with AsyncEngine(folder, tracer_provider=provider, **options) as engine:
        async for _ in engine.generate([5], SamplingParams(max_tokens=1)):
            continue
        began = time.monotonic()
        for _ in range(number):
            async for _ in engine.generate([5, 6], SamplingParams(max_tokens=2)):
                continue
        return time.monotonic() - began


def test_spans_arrive_at_an_otlp_endpoint(folder, receiver):
    with spans_to(f"http://127.0.0.1:{receiver.server_port}/v1/traces") as provider:
        asyncio.run(complete(folder, provider, 3))
    found = []
    for path, kind, body in receiver.received:
        assert (path, kind) == ("/v1/traces", "application/x-protobuf")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert names["service.name"] == "ringcore"
            found += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(found) == sorted(4 * ["llm_request", *PARTS])


def test_an_endpoint_that_hangs_slows_nothing(folder):
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:  # it accepts, and answers nothing
        began = time.monotonic()
        with spans_to(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces") as provider:
            assert asyncio.run(complete(folder, provider, 50)) < 10
            ending = time.monotonic()
        assert time.monotonic() - ending < 15
        assert time.monotonic() - began < 60


class Stuck(SpanProcessor):
    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def on_end(self, span) -> None:
        assert self.goes_on.wait(60)


def test_a_processor_that_hangs_loses_spans_beyond_a_bound(folder, monkeypatch, caplog):
    monkeypatch.setattr(request_spans, "MAX_QUEUED", 5)
    monkeypatch.setattr(request_spans, "_JOIN_S", 0.05)
    stuck, provider = Stuck(), TracerProvider()
    provider.add_span_processor(stuck)
    assert asyncio.run(complete(folder, provider, 20)) < 5
    stuck.goes_on.set()
    (said,) = [one.getMessage() for one in caplog.records if "were dropped" in one.getMessage()]
    assert said == "the spans of 15 requests were dropped: the span processor was too slow"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", ""])
def test_an_endpoint_that_is_none(endpoint, capsys, folder):
    with pytest.raises(ConfigError, match="give the URL of an OTLP/HTTP endpoint"):
        otlp_provider(endpoint)
    with pytest.raises(SystemExit) as caught:
        main(["serve", folder, "--port", "0", "--otlp-traces-endpoint", endpoint])
    assert caught.value.code == 2
    assert "otlp_traces_endpoint=" in capsys.readouterr().err
