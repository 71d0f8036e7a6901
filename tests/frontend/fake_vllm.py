"""A scripted upstream over real sockets: records every byte, and imitates vLLM's prefix cache in front of a card.

HTTP is read by hand and strictly: a body is what Content-Length says, so that a second request hidden in the first would be
seen as one. Tokens are words, a block is 16 of them; a block is found if it and all before it were computed under the same salt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK_TOKENS: Final = 16
LINE_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it came."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, "a header stands twice"
        return values[0] if values else None


Script = Callable[[Recorded, asyncio.StreamWriter], Awaitable[None]]


def reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def json_reply(value: Any, status: str = "200 OK") -> bytes:
    return reply(status, json.dumps(value).encode(), "Content-Type: application/json")


CHUNKED_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


@dataclass(slots=True)
class PrefixCache:
    """Blocks in the engine, and blocks on the card, which outlive it."""

    engine: set[bytes] = field(default_factory=set)
    card: set[bytes] = field(default_factory=set)
    enabled: bool = True
    uses_card: bool = True

    def request(self, salt: str | None, prompt: str, *, store: bool = True) -> tuple[int, int]:
        """Return (tokens, cached tokens), and remember the blocks."""
        tokens = prompt.split()
        digest = hashlib.sha256(repr(salt).encode()).digest()
        cached, found = 0, self.enabled
        for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            digest = hashlib.sha256(digest + repr(tokens[begin : begin + BLOCK_TOKENS]).encode()).digest()
            # The last token is always computed, so that a block which ends the prompt is not found.
            whole = begin + BLOCK_TOKENS < len(tokens)
            found = (
                found
                and whole
                and (digest in self.engine or (store and self.uses_card and digest in self.card))
            )
            cached += BLOCK_TOKENS if found else 0
            self.engine.add(digest)
            if store:
                self.card.add(digest)
        return len(tokens), cached


class FakeVllm:
    """The server. `script` replaces what it answers."""

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self.connections = 0
        self.open_connections = 0
        self.bad_bytes: list[bytes] = []
        """What came and was not a request."""
        self.cache = PrefixCache()
        self.script: Script | None = None
        self.version: str | None = "0.32.0"
        self.tells_cached = True
        self.busy_resets = 0
        self.now_ns = 0
        """Virtual time, for tools that measure: advanced by the latency model."""
        self.base_ns = 20_000_000
        self.token_ns = 100_000
        self.jitter_ns: Callable[[], int] = lambda: 0
        self.restarts = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.closed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=LINE_MAX)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self.all_closed()

    async def restart(self) -> None:
        """As the engine: its own cache is gone, the card's is not."""
        await self.stop()
        self.cache.engine.clear()
        self.restarts += 1
        await self.start()

    async def all_closed(self, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds), self.closed:
            await self.closed.wait_for(lambda: self.open_connections == 0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        self._writers.add(writer)
        try:
            while (request := await self._read(reader)) is not None:
                self.requests.append(request)
                await self._answer_or_notice(request, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            async with self.closed:
                self.open_connections -= 1
                self.closed.notify_all()

    async def _answer_or_notice(
        self, request: Recorded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer; stop at once when the caller goes away, as vLLM does."""
        answer = asyncio.ensure_future((self.script or self._answer)(request, writer))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            early = b"" if gone.exception() else gone.result()
            if early:
                self.bad_bytes.append(early)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            raise ConnectionResetError
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        answer.result()
        await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> Recorded | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.bad_bytes.append(error.partial)
            return None
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, version = first.split(" ")
        assert version == "HTTP/1.1"
        headers = [
            (name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
        ]
        request = Recorded(method, target, headers, b"")
        assert request.header("transfer-encoding") is None
        body = await reader.readexactly(int(request.header("content-length") or 0))
        return Recorded(method, target, headers, body)

    async def _answer(self, request: Recorded, writer: asyncio.StreamWriter) -> None:
        match request.method, request.target:
            case "GET", "/version":
                writer.write(
                    json_reply({"version": self.version}) if self.version else json_reply({}, "404 Not Found")
                )
            case "GET", "/health":
                writer.write(reply("200 OK", b""))
            case "GET", "/v1/models":
                writer.write(json_reply({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))
            case "POST", "/reset_prefix_cache":
                # As vLLM does while blocks are still being written.
                emptied = self.busy_resets == 0
                self.busy_resets -= not emptied
                if emptied:
                    self.cache.engine.clear()
                writer.write(json_reply({"success": emptied}))
            case "POST", _:
                await self._complete(request.json, writer)
            case _:
                writer.write(json_reply({"error": "no"}, "404 Not Found"))

    async def _complete(self, body: Any, writer: asyncio.StreamWriter) -> None:
        prompt = body.get("prompt") or json.dumps(body.get("messages") or body.get("input"))
        store = (body.get("kv_transfer_params") or {}).get("xkv_store", True)
        tokens, cached = self.cache.request(body.get("cache_salt"), prompt, store=store)
        self.now_ns += self.base_ns + self.token_ns * (tokens - cached) + self.jitter_ns()
        details = {"cached_tokens": cached} if self.tells_cached else None
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": details}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        if not body.get("stream"):
            writer.write(json_reply({"id": "cmpl-1", "model": "tiny", "choices": [choice], "usage": usage}))
            return
        events = [event({"choices": [choice]})]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(event({"choices": [], "usage": usage}))
        writer.write(CHUNKED_HEAD + b"".join(map(chunk, [*events, event(b"[DONE]")])) + LAST_CHUNK)


@asynccontextmanager
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()
