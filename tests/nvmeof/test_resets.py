"""A connection that is reset behind bytes that were not read yet: uvloop tells of that once, and each end must notice all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.nvmeof.fake_target import HANG_S
from xkv_nvmeof.command import CompletionEntry
from xkv_nvmeof.controller_card import Card
from xkv_nvmeof.controller_types import CardConfig, NamespaceInfo
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.host_command import Exchange, Outcome
from xkv_nvmeof.host_settings import ConnectionLost, QueueSettings
from xkv_nvmeof.initiator_link import QueueLink
from xkv_nvmeof.pdu import CapsuleResp, ICReq, ICResp, encode
from xkv_nvmeof.softcard.executor import Executor
from xkv_nvmeof.softcard.server import Server
from xkv_nvmeof.softcard.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 4096


def reset_behind(sock: socket.socket, data: bytes) -> None:
    """Send the last bytes, and reset the connection before anybody can have read them."""
    sock.sendall(data)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as one:
        one.connect(listener.getsockname())
        other, _ = listener.accept()
        with other:
            yield one, other


@pytest.mark.parametrize("last", [b"\x07\x00\x18", b""], ids=["behind a part of a PDU", "behind nothing"])
@pytest.mark.parametrize("blocked", [False, True], ids=["reading", "writing as well"])
def test_a_host_notices_a_reset(last: bytes, blocked: bool) -> None:
    async def play() -> None:
        ended, connected = asyncio.Event(), asyncio.Event()
        with tcp_pair() as (ours, theirs):
            settings = QueueSettings(8, in_capsule_bytes=64 << 20)
            link = QueueLink(ours, settings, lambda: 0, lambda _link: ended.set())
            setup = asyncio.create_task(link.setup(1 << 62))
            await asyncio.sleep(0)
            assert theirs.recv(1024)
            theirs.sendall(encode(ICResp(1, False, False, 1 << 20)))
            await setup
            connect = Exchange(bytearray(64), on_finish=lambda _exchange: connected.set())
            link.submit_connect(connect)
            sqe = theirs.recv(1024)[8:]
            theirs.sendall(
                encode(CapsuleResp(CompletionEntry(int.from_bytes(sqe[2:4], "little"), 0, 1).to_bytes()))
            )
            await connected.wait()
            exchange = Exchange(bytearray(64))
            if blocked:
                # More than the buffers of both sockets hold: the rest waits for room.
                exchange = Exchange(bytearray(64), send=[memoryview(bytes(32 << 20))], send_bytes=32 << 20)
            link.submit(exchange)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert bool(link.core.outbox) is blocked
            reset_behind(theirs, last)
            async with asyncio.timeout(HANG_S):
                await ended.wait()
            assert isinstance(link.core.failure, ConnectionLost)
            assert exchange.outcome is not Outcome.COMPLETED

    uvloop.run(play())


def card() -> Card:
    namespace = NamespaceInfo(
        block_bytes=BLOCK,
        block_count=256,
        nguid=b"\x11" * 16,
        uuid=b"\x22" * 16,
        used_blocks=lambda: 0,
    )
    return Card(
        CardConfig(
            "nqn.2026-01.org.example:card",
            namespace,
            "SERIAL",
            header_digest=DigestPolicy.OFF,
            data_digest=DigestPolicy.OFF,
        )
    )


@pytest.mark.parametrize("last", [b"\x04\x00\x48", b""], ids=["behind a part of a PDU", "behind nothing"])
def test_the_soft_card_notices_a_reset(last: bytes) -> None:
    async def play() -> None:
        store = Store.in_memory(256 * BLOCK, BLOCK, os.urandom)
        # Its clock stands still, so that no deadline ends the connection instead.
        server = Server(card(), Executor(store, lambda: 0), lambda: 0)
        listener = socket.create_server(("127.0.0.1", 0))
        server.listen(listener)
        loop = asyncio.get_running_loop()
        with socket.socket() as host:
            host.setblocking(False)
            await loop.sock_connect(host, listener.getsockname())
            await loop.sock_sendall(host, encode(ICReq(1, False, False, 1)))
            assert await loop.sock_recv(host, 1024)
            assert len(server.peers) == 1
            host.setblocking(True)
            reset_behind(host, last)
            async with asyncio.timeout(HANG_S):
                while server.peers:  # noqa: ASYNC110 - a callback without an event
                    await asyncio.sleep(0.01)
        await server.aclose()
        store.close()

    uvloop.run(play())
