from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from tests.frontend.fake_vllm import CHUNKED_HEAD, LAST_CHUNK, chunk
from tests.ports import held_port
from xkv_frontend.link import UNREAD_BYTES_MAX, Fault, Link, UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEADERS = [(b"host", b"x")]


@asynccontextmanager
async def server(*pieces: bytes, stay: bool = False, reset: bool = False) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if stay:
            await reader.read()
        if reset:
            writer.transport.abort()

    async with serving(serve) as port:
        yield port


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[int]:
    """Serve connections until the block ends, and leave none of them open."""
    open_tasks: set[asyncio.Task[None]] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(guarded(reader, writer))
        open_tasks.add(task)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        if open_tasks:
            await asyncio.wait(open_tasks, timeout=10)


async def ask(port: int, silence_s: float = 60) -> tuple[int, bytes]:
    async with Link(silence_s) as link:
        await link.open("127.0.0.1", port, None)
        status, _ = await link.ask(b"GET", b"/", HEADERS, [])
        body = b""
        while piece := await link.piece():
            body += piece
        return status, body


ANSWERS = {
    "by length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    "in chunks": (CHUNKED_HEAD + chunk(b"he") + chunk(b"llo") + LAST_CHUNK, b"hello"),
    "until the end of the connection": (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
    "after an interim answer": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"hello",
    ),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
}


@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_read_the_same_in_any_pieces(name: str, stay: bool) -> None:
    raw, body = ANSWERS[name]
    if stay and name == "until the end of the connection":
        return
    async with server(raw, stay=stay) as port:
        assert await ask(port) == (200, body)
    async with server(*(bytes([byte]) for byte in raw), stay=stay) as port:
        assert await ask(port) == (200, body)


FAULTS = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nCont",
    "not HTTP": b"SSH-2.0-x\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe",
    "half a chunk": CHUNKED_HEAD + b"5\r\nhe",
    "a chunk of nonsense": CHUNKED_HEAD + b"zz\r\n",
}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", FAULTS)
async def test_what_is_not_a_whole_answer_broke_off(name: str, reset: bool) -> None:
    async with server(FAULTS[name], reset=reset) as port:
        with pytest.raises(UpstreamError) as caught:
            await ask(port)
    assert caught.value.fault is Fault.BROKE_OFF


async def test_a_reset_is_no_end_of_an_answer_that_ends_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf")
        await writer.drain()
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(serve) as port:
        with pytest.raises(UpstreamError):
            await ask(port)


async def test_silence_has_an_end_and_nobody_listening_is_told_at_once() -> None:
    async with server(stay=True) as port:
        with pytest.raises(UpstreamError) as caught:
            await ask(port, silence_s=0.05)
        assert caught.value.fault is Fault.SILENT
    with held_port() as nobody, pytest.raises(UpstreamError) as caught:
        await ask(nobody)
    assert caught.value.fault is Fault.UNREACHABLE


async def test_what_nobody_takes_is_not_read_from_the_socket() -> None:
    sent = 0
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 << 20))
        for _ in range(1600):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536
        done.set()

    async with serving(serve) as port, Link(60) as link:
        await link.open("127.0.0.1", port, None)
        await link.ask(b"GET", b"/", HEADERS, [])
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.05)  # buffers on the way are filling; when nothing moves they are full
        assert not done.is_set()
        assert link._unread <= UNREAD_BYTES_MAX + (1 << 20)
        total = 0
        while piece := await link.piece():
            total += len(piece)
        assert total == 100 << 20
