"""A service that costs next to nothing: it answers every completion with `max_tokens` made events, one each
`interval_s`, or as fast as the client takes them.

    python -m benchmarks.peers.stream_server      prints its port; ends with its standard input
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

EVENT = b'data: {"id":"cmpl-0","object":"text_completion","model":"made","choices":[{"index":0,"text":" word"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class StreamServer(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport, self._unread = transport, b""
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:]) if end else {}
        length = int(fields.get(b"content-length", b"0"))
        if not end or len(rest) < length:
            return
        self._unread = rest[length:]
        self._task = asyncio.ensure_future(self._answer(json.loads(rest[:length])))

    async def _answer(self, body: dict[str, Any]) -> None:
        num, interval_s = body["max_tokens"], body.get("interval_s", 0.0)
        self._transport.write(HEAD)
        next_s = asyncio.get_running_loop().time()
        for _ in range(num):
            if interval_s:
                next_s += interval_s
                await asyncio.sleep(next_s - asyncio.get_running_loop().time())
            else:
                await asyncio.sleep(0)
            await self._may_write.wait()
            self._transport.write(CHUNK)
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num}}
        last = b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
        self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StreamServer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
