"""A stand-in for vLLM that costs next to nothing: `python -m bench.frontend_upstream PORT`.

It answers after `X-Think-Ms` of the prompt, found in the body as `think=N`; a streaming request gets `events=N` events, one
every `every=N` milliseconds after the first.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

BODY = b'{"id":"x","choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"token"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
LAST = b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
NUMBERS = re.compile(rb"think=(\d+) events=(\d+) every=(\d+)")


class Upstream(asyncio.Protocol):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, mark, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not mark or length is None or len(body) < int(length[1]):
            return
        self.received = b""
        self.last = b"connection: close" in head.lower()
        numbers = NUMBERS.search(body)
        assert numbers is not None
        think_ms, events, every_ms = map(int, numbers.groups())
        step = self.whole if events == 0 else lambda: self.stream(events, every_ms / 1e3, HEAD)
        if think_ms:
            self.loop.call_later(think_ms / 1e3, step)
        else:
            step()

    def whole(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        self.transport.write(head + BODY)
        self.end()

    def stream(self, left: int, every_s: float, head: bytes = b"") -> None:
        if self.transport.is_closing():
            return
        self.transport.write(head + CHUNK + (b"" if left > 1 else LAST))
        if left > 1:
            self.loop.call_later(every_s, self.stream, left - 1, every_s)
        else:
            self.end()

    def end(self) -> None:
        if self.last:
            self.transport.close()


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
