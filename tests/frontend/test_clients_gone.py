"""Clients that go away, and clients that do not read: nothing is left behind, in whichever moment it happens."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.fake_vllm import CHUNKED_HEAD, LAST_CHUNK, chunk, event
from tests.frontend.harness import HELLO, KEY_B, Running, raw_post, talk, until
from xkv_frontend.core.limits import Limiter

if TYPE_CHECKING:
    from tests.frontend.fake_vllm import FakeVllm, Recorded

BODY = json.dumps(HELLO).encode()


async def silent(_: Recorded, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def head_only(_: Recorded, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD)
    await asyncio.Event().wait()


async def between_events(_: Recorded, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD + chunk(event({"n": 1})))
    await asyncio.Event().wait()


async def flood(_: Recorded, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD)
    while True:
        writer.write(chunk(bytes(65536)))
        await writer.drain()


WINDOWS: dict[str, Any] = {
    "while the upstream is silent": silent,
    "after the head": head_only,
    "between events": between_events,
    "while it reads nothing": flood,
}


@pytest.mark.parametrize("abrupt", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize(
    "more", [b"", raw_post(BODY)[:30], raw_post(BODY) * 3], ids=["", "half a request more", "requests more"]
)
@pytest.mark.parametrize("window", WINDOWS)
async def test_when_the_client_goes_the_upstream_is_let_go(
    front: Running, fake: FakeVllm, window: str, more: bytes, abrupt: bool
) -> None:
    fake.script = WINDOWS[window]
    client = socket.socket()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", front.port))
    await loop.sock_sendall(client, raw_post(BODY) + more)
    await until(lambda: len(fake.requests) == 1)
    if window not in ("while the upstream is silent", "while it reads nothing"):
        await loop.sock_recv(client, 10)
    if abrupt:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    await fake.all_closed()
    await until(lambda: front.front.running == 0)
    assert len(fake.requests) == 1
    assert '"outcome": "client_gone"' in front.log[-1]


async def test_a_client_that_leaves_while_it_sends_reaches_nothing(front: Running, fake: FakeVllm) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(raw_post(BODY)[:-5])
    await until(lambda: front.front.running == 1)
    writer.close()
    await until(lambda: front.front.running == 0)
    assert fake.connections == 0


async def test_a_client_that_reads_slowly_slows_the_upstream_down(front: Running, fake: FakeVllm) -> None:
    sent = 0

    async def script(_request: Recorded, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED_HEAD)
        for _ in range(2000):
            writer.write(chunk(bytes(65536)))
            await writer.drain()
            sent += 65536
        writer.write(LAST_CHUNK)

    fake.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 16)
    writer.write(raw_post(BODY))
    seen = -1
    while seen != sent:
        # All buffers on the way are filling; when nothing moves for a while they are full.
        seen = sent
        await asyncio.sleep(0.1)
    assert sent < 64 << 20
    total = len(await reader.read(1))
    while total < 2000 * 65536:
        total += len(await reader.read(1 << 20))
    writer.close()


async def test_a_thousand_clients_that_vanish_leave_nothing(front: Running, fake: FakeVllm) -> None:
    fake.script = between_events
    for _ in range(10):
        before = len(fake.requests)
        streams = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(100)]
        for number, (_, writer) in enumerate(streams):
            writer.write(raw_post(BODY, key=KEY_B)[: None if number % 4 else -10])
        await until(lambda wanted=before + 75: len(fake.requests) == wanted)
        for _, writer in streams:
            writer.transport.abort()
        await until(lambda: front.front.running == 0)
    await fake.all_closed()
    assert not front.front._running
    assert isinstance(front.front._limiter, Limiter)
    fake.script = None
    assert (await front.post(HELLO)).status_code == 200
    assert b"xkv_frontend_in_flight" in front.metrics.page()
    assert b'xkv_frontend_in_flight{tenant="beta"} 0.0' in front.metrics.page()


async def test_half_a_connection_closed_is_a_client_gone(front: Running, fake: FakeVllm) -> None:
    fake.script = silent
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(raw_post(BODY))
    await until(lambda: len(fake.requests) == 1)
    writer.write_eof()
    await fake.all_closed()
    writer.close()


async def test_a_long_silence_of_the_upstream_is_not_cut(front: Running, fake: FakeVllm) -> None:
    release = asyncio.Event()

    async def prefill(_: Recorded, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(CHUNKED_HEAD + chunk(event({"n": 1})) + LAST_CHUNK)

    fake.script = prefill
    answer = asyncio.create_task(talk(front.port, raw_post(BODY, "Connection: close")))
    await until(lambda: len(fake.requests) == 1)
    assert front.front.running == 1
    release.set()
    assert (await answer).endswith(LAST_CHUNK)
