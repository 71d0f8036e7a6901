"""Connections without keys whose peers misbehave below the messages: nothing of them stays, and nothing grows."""

from __future__ import annotations

import gc
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rpc.harness import HANG_S, DictService, RawClient, Served, serving, wait_until
from tests.rpc.test_codec import packed
from tests.rpc.test_server import MIB, resident_bytes
from xkv_rpc import zmtp

if TYPE_CHECKING:
    from collections.abc import Iterator

RESETTING = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection, as the kernel does for a process that is killed with replies unread."""


def ready(identity: bytes) -> bytes:
    whole = zmtp.ready(b"DEALER")
    body = whole[2:-4] + len(identity).to_bytes(4, "big") + identity
    return bytes((zmtp.COMMAND, len(body))) + body


def connect(served: Served, identity: bytes = b"") -> socket.socket:
    host, _, port = served.endpoint.removeprefix("tcp://").rpartition(":")
    sock = socket.create_connection((host, int(port)), HANG_S)
    sock.sendall(zmtp.GREETING + ready(identity))
    left = zmtp.GREETING_BYTES + len(zmtp.ready(b"ROUTER"))
    while left:
        left -= len(sock.recv(left))
    return sock


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(DictService(), fast_loop=request.param) as one:
        yield one


def test_a_client_that_is_reset_in_mid_message_leaves_nothing_and_its_name_is_free(served: Served) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    part = packed("ping", {})
    for _ in range(20):
        sock = connect(served, b"name")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETTING)
        sock.sendall(
            zmtp.frame_head(len(part), more=True) + part + zmtp.frame_head(MIB, more=False) + b"x" * 999
        )
        sock.close()
    wait_until(lambda: descriptors() <= before, "connections stay open")
    with RawClient(served.endpoint, b"name") as client:
        assert client.ask(packed("ping", {}))["ok"]


def test_peers_that_leave_amid_the_handshake_are_forgotten_at_once(served: Served) -> None:
    connections = served.server._endpoints._listener._connections
    host, _, port = served.endpoint.removeprefix("tcp://").rpartition(":")
    for sent in (0, 1, 30, zmtp.GREETING_BYTES):
        for _ in range(5):
            sock = socket.create_connection((host, int(port)), HANG_S)
            sock.sendall(zmtp.GREETING[:sent])
            sock.close()
    wait_until(
        lambda: served.run(lambda: not connections and not served.server._endpoints._listener._timers),
        "some stay",
    )


def test_a_large_frame_takes_memory_as_it_comes_and_gives_it_back_at_the_end(served: Served) -> None:
    before = resident_bytes()
    announced = [connect(served) for _ in range(8)]
    for sock in announced:
        sock.sendall(zmtp.frame_head(64 * MIB, more=False) + b"x" * 100)
    connections = served.server._endpoints._listener._connections
    wait_until(
        lambda: served.run(lambda: sum(one._core._body is not None for one in connections.values()) == 8),
        "unheard",
    )
    assert resident_bytes() < before + 16 * MIB
    announced[0].sendall(b"x" * (48 * MIB))
    gc.collect()
    gc.disable()
    try:
        for sock in announced:
            sock.close()
        wait_until(lambda: served.run(lambda: not connections), "connections stay")
        wait_until(lambda: resident_bytes() < before + 32 * MIB, "the body of a message stays")
    finally:
        gc.enable()


def test_heartbeats_of_a_peer_that_does_not_read_are_not_piled_up(served: Served) -> None:
    ping = b"\x04PING\0\0" + b"c" * 16
    pings = (bytes((zmtp.COMMAND, len(ping))) + ping) * 4000
    with connect(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        (connection,) = served.server._endpoints._listener._connections.values()
        for _ in range(200):
            sock.sendall(pings)
            if served.run(lambda: connection.sending):
                break
        else:
            pytest.fail("the kernel took everything")
        queued = served.run(lambda: len(connection._queue))
        for _ in range(10):
            sock.sendall(pings)
        assert served.run(lambda: len(connection._queue)) <= queued
