"""A scripted SPDK: JSON-RPC on a Unix socket, with a model of the target behind it, or with answers byte by byte.

Requests are taken one at a time from each connection, as the real one does. What it models is what was measured on the real
one: the shapes of its answers, its coarse errors, and that it keeps nothing when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

Params = dict[str, Any]


class RpcFault(Exception):  # noqa: N818 - what the target says, not an error of ours
    """An error as the target answers it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FakeSpdk:
    """Serves a socket. `handle(method, params)` gives the result; `script`, where set, answers in its place, in bytes."""

    def __init__(self, path: Path, handle: Callable[[str, Params], Any]) -> None:
        self.path = path
        self.handle = handle
        self.script: Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]] | None = None
        """Returns whether it has answered; else the model does."""
        self.calls: list[tuple[str, Params]] = []
        self.connections = 0
        self.connections_most = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        """As after a kill: connections are gone, the socket's file stays."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.connections_most = max(self.connections, self.connections_most)
        self._writers.add(writer)
        text, decoder = "", json.JSONDecoder()
        try:
            while data := await reader.read(65536):
                text += data.decode()
                while text := text.lstrip():
                    try:
                        request, end = decoder.raw_decode(text)
                    except ValueError:
                        break
                    text = text[end:]
                    await self._answer(request, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.connections -= 1
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        method, params = request["method"], request.get("params", {})
        self.calls.append((method, params))
        if self.script is not None and await self.script(request, writer):
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            answer["result"] = self.handle(method, params)
        except RpcFault as fault:
            answer["error"] = {"code": fault.code, "message": str(fault)}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


@contextlib.asynccontextmanager
async def fake_spdk(path: Path, handle: Callable[[str, Params], Any]) -> AsyncIterator[FakeSpdk]:
    fake = FakeSpdk(path, handle)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()
