"""Between the connector and the gateway: passes everything on, except the operation that a test spoils."""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PIECE_BYTES: Final = 1 << 20


class Fault(Enum):
    """What happens to a request."""

    CUT = "cut"
    """Its connection ends, and it never arrives."""
    HOLD = "hold"
    """It arrives only when the test lets it."""
    DEAF = "deaf"
    """It arrives, and its reply never does."""


class Meddler:
    """A proxy on loopback."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.caught = 0
        """Requests that were spoiled."""
        self._rules: dict[bytes, Fault] = {}
        self._go = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def spoil(self, operation: str, fault: Fault) -> None:
        """From now on, do this to requests of that kind."""
        self._go.clear()
        # As the header has it: the text "op", and the operation's name.
        self._rules[b"\xa2op" + bytes([0xA0 | len(operation)]) + operation.encode()] = fault

    def relent(self) -> None:
        """Let through what was held, and all that comes."""
        self._rules.clear()
        self._go.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError):
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            deaf = asyncio.Event()
            try:
                back = asyncio.create_task(self._replies(onward_reader, writer, deaf))
                await self._requests(reader, onward_writer, deaf)
                back.cancel()
                await asyncio.wait([back])
            finally:
                onward_writer.close()
        writer.close()
        self._tasks.discard(task)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while piece := await reader.read(PIECE_BYTES):
            fault = next((fault for mark, fault in self._rules.items() if mark in piece), None)
            self.caught += fault is not None
            match fault:
                case Fault.CUT:
                    return
                case Fault.HOLD:
                    await self._go.wait()
                case Fault.DEAF:
                    deaf.set()
            writer.write(piece)
            await writer.drain()

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if not deaf.is_set():
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@contextlib.asynccontextmanager
async def meddler(target_port: int) -> AsyncIterator[Meddler]:
    """Serve on a free port of loopback."""
    one = Meddler(target_port)
    server = await asyncio.start_server(one._serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        await one.aclose()
