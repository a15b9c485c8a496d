"""A service whose answers and faults are known: each token is an event. What a prompt says, it does:

"FAULT-<kind>" breaks the answer; "STALL" stops the whole service for a quarter of a second first."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STALL_S = 0.25


class RawHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    refusal = 503, "busy"

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "raw"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body, dict(self.headers)))
        prompt = json.dumps(body.get("prompt") or body["messages"])
        with self.server.one_at_a_time:
            if "STALL" in prompt:
                time.sleep(STALL_S)
        if "FAULT-status" in prompt:
            status, message = self.refusal
            return self._whole(status, {"error": {"message": message}})
        num_tokens = body["max_tokens"] - ("FAULT-short" in prompt)
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
        if "FAULT-usage" in prompt:
            usage = None
        if not body.get("stream"):
            return self._whole(200, {"choices": [{"text": "x" * body["max_tokens"]}], "usage": usage})
        return self._stream(prompt, body["max_tokens"], usage, is_chat="messages" in body)

    def _stream(self, prompt: str, num: int, usage: Any, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(num):
            if i == 1 and "FAULT-cut" in prompt:
                self.close_connection = True
                return self.connection.close()
            if i == 1 and "FAULT-done" in prompt:
                return self._chunk(b"")
            if i == 1 and "FAULT-error" in prompt:
                return self._end({"error": {"message": "out of order"}})
            if i == 1 and "FAULT-form" in prompt:
                return self._end([1, 2])
            if i == 1 and "FAULT-slow" in prompt:
                time.sleep(2.0)
            if "FAULT-text" not in prompt:
                for choice in self.choices_of(i, is_chat=is_chat):
                    self._event({"choices": [choice]})
        return self._end({"choices": [], "usage": usage})

    def choices_of(self, i: int, *, is_chat: bool) -> list[dict[str, Any]]:
        """Of the events of a token."""
        delta = {"reasoning_content": "hm "} if i == 0 else {"content": f"w{i} "}
        return [{"delta": delta} if is_chat else {"text": f" w{i}"}]

    def _end(self, value: Any) -> None:
        self._event(value)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _whole(self, status: int, value: Any) -> None:
        payload = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _event(self, value: Any) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self._chunk(data[:5])  # an event may be cut anywhere
        self._chunk(data[5:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *arguments: object) -> None: ...


class RawService(ThreadingHTTPServer):
    """`bodies`: what was asked. A STALL holds all requests up."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[RawHandler] = RawHandler, port: int = 0) -> None:
        import threading

        super().__init__(("127.0.0.1", port), handler)
        self.bodies: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.one_at_a_time = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> RawService:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
