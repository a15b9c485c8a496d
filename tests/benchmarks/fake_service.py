"""A service whose every answer is known: each token is a word of its own, one an event. The word "FAULT-<kind>" in a
prompt makes it misbehave; FAKE_SHIFT in its environment makes it say other words.

    python fake_service.py PORT
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHIFT = os.environ.get("FAKE_SHIFT", "")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, num = body["prompt"], body["max_tokens"]
        assert body["stream"], body
        assert body["ignore_eos"], body
        if "FAULT-status" in prompt:
            return self._refuse()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(num):
            if i == 1 and "FAULT-cut" in prompt:
                self.close_connection = True
                return None
            if i == 1 and "FAULT-error" in prompt:
                self._event({"error": {"message": "out of order"}})
            self._event({"choices": [{"index": 0, "text": f" word{i}{SHIFT}"}]})
            if i == 0:  # a token without text, as within a character
                self._event({"choices": [{"index": 0, "text": ""}]})
        short = int("FAULT-short" in prompt)
        self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num - short}})
        self._chunk(b"data: [DONE]\n\n")
        return self._chunk(b"")

    def _refuse(self) -> None:
        payload = b'{"error": {"message": "no such model"}}'
        self.send_response(404)
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


def make_server(port: int = 0) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    make_server(int(sys.argv[1])).serve_forever()
