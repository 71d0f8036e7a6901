"""A TCP relay in front of a controller: one of several ways to it, which a test can cut or silence."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from tests.ports import held_port

if TYPE_CHECKING:
    from types import TracebackType

CHUNK_BYTES = 1 << 16


class Relay:
    """Use as `async with Relay(port) as relay:`; `relay.port` is where it listens."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._held = contextlib.ExitStack()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.passed_bytes = 0

    async def __aenter__(self) -> Self:
        self.port = self._held.enter_context(held_port())
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()

    @property
    def connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> None:
        """Break all connections, and take no more."""
        if self._server is not None:
            self._server.close()
        self.drop()

    def drop(self) -> None:
        """Break all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def mend(self) -> None:
        """Listen again at the same port, and let everything flow."""
        self._flowing.set()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)

    def silence(self) -> None:
        """Pass nothing on any more; the connections stay."""
        self._flowing.clear()

    def speak(self) -> None:
        """Let everything flow again, that of connections which nobody has any more too."""
        self._flowing.set()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._writers.add(sink)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK_BYTES):
                await self._flowing.wait()
                sink.write(data)
                self.passed_bytes += len(data)
                await sink.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            sink.transport.abort()
            self._writers.discard(sink)
