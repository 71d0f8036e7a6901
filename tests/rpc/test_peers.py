"""Connections without keys whose peers misbehave below the messages: nothing of them stays, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from tests.rpc.harness import HANG_S, DictService, RawClient, Served, serving, wait_until
from tests.rpc.test_codec import packed
from tests.rpc.test_server import MIB, resident_bytes
from xkv_rpc import zmtp
from xkv_rpc.connection import MESSAGES_PER_TURN
from xkv_rpc.session import ServerBounds

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from xkv_rpc.calls import Call
    from xkv_rpc.messages import PeerId

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


def ask(sock: socket.socket) -> dict[str, Any]:
    """Return the next reply."""
    head = received(sock, 2)
    assert head[0] == 0
    return dict(msgpack.unpackb(received(sock, head[1])))


def received(sock: socket.socket, count: int) -> bytes:
    whole = b""
    while len(whole) < count:
        whole += sock.recv(count - len(whole)) or pytest.fail("closed")
    return whole


def framed(*bodies: bytes) -> bytes:
    last = len(bodies) - 1
    return b"".join(zmtp.frame_head(len(body), more=at < last) + body for at, body in enumerate(bodies))


@pytest.mark.parametrize("fast_loop", [True, False])
def test_messages_that_have_not_come_whole_are_bounded_together_and_others_are_served(
    fast_loop: bool,
) -> None:
    bounds = ServerBounds(partial_bytes_max=4 * MIB)
    fields = {"ns": "", "scope": b"", "keys": [b"k"], "sizes": [MIB]}
    message = framed(packed("store", fields), bytes(MIB))
    with serving(DictService(), bounds=bounds, fast_loop=fast_loop) as served, ExitStack() as sockets:
        room = served.server._endpoints._listener._room
        begun = [sockets.enter_context(connect(served)) for _ in range(8)]
        for sock in begun:
            sock.sendall(message[:-1])
        wait_until(lambda: served.run(lambda: room.left_bytes) < MIB, "unheard")
        with RawClient(served.endpoint) as client:
            assert client.ask(packed("ping", {}))["ok"]
        for sock in begun:
            sock.sendall(message[-1:])
        replies = [ask(sock) for sock in begun]
        kept = [reply for reply in replies if reply["ok"]]
        assert 1 <= len(kept) <= 4
        assert all(
            reply["id"] == kept[0]["id"]
            and reply["error"]["code"] == "busy"
            and reply["error"]["retry_after_ms"]
            for reply in replies
            if not reply["ok"]
        )
        assert served.run(lambda: room.left_bytes) == bounds.partial_bytes_max
        for sock in begun:
            sock.sendall(message[:-1])
            sock.close()
        wait_until(lambda: served.run(lambda: room.left_bytes) == bounds.partial_bytes_max, "not given back")


def stalled(served: Served) -> dict[PeerId, int]:
    connections = served.server._endpoints._listener._connections
    return {peer: at for peer, one in connections.items() if (at := one.stalled_at) is not None}


def look_for_stalled(served: Served, before: dict[PeerId, int]) -> None:
    listener = served.server._endpoints._listener
    served.run(listener._stall_timer.cancel)
    served.run(lambda: listener._look_for_stalled(before))


PING = packed("ping", {})
LONG_HEADER = zmtp.frame_head(60_000, more=False)
PLACES = {
    "a payload": framed(PING, bytes(300))[:-299],
    "a head": LONG_HEADER[:4],
    "a small header": LONG_HEADER + b"x",
    "between two frames": zmtp.frame_head(len(PING), more=True) + PING,
}


@pytest.mark.parametrize("place", PLACES)
def test_who_stops_in_mid_message_is_let_go_and_who_goes_on_is_not(served: Served, place: str) -> None:
    with connect(served) as stopped, connect(served) as slow, connect(served) as idle:
        stopped.sendall(PLACES[place])
        slow.sendall(PLACES["a payload"])
        wait_until(lambda: len(served.run(lambda: stalled(served))) == 2, "unheard")
        idle.sendall(framed(PING))
        assert ask(idle)["ok"]
        before = served.run(lambda: stalled(served))
        slow.sendall(b"x")
        wait_until(lambda: served.run(lambda: stalled(served)) != before, "unheard")
        look_for_stalled(served, before)
        assert stopped.recv(1) == b""
        slow.sendall(bytes(298))
        idle.sendall(framed(PING))
        assert ask(slow)["error"]["code"] == "bad_request"
        assert ask(idle)["ok"]


def test_who_is_at_the_same_place_of_another_message_goes_on(served: Served) -> None:
    message = framed(PING, bytes(300))
    with connect(served) as busy:
        busy.sendall(message[:-100])
        wait_until(lambda: bool(served.run(lambda: stalled(served))), "unheard")
        before = served.run(lambda: stalled(served))
        busy.sendall(message[-100:] + message[:-100])
        assert ask(busy)["error"]["code"] == "bad_request"
        wait_until(lambda: served.run(lambda: stalled(served)) not in ({}, before), "unheard")
        look_for_stalled(served, before)
        busy.sendall(message[-100:])
        assert ask(busy)["error"]["code"] == "bad_request"


class Ending(DictService):
    """Ends its server with the first request."""

    end: Callable[[], Coroutine[Any, Any, None]] | None = None

    def handle(self, call: Call) -> None:
        super().handle(call)
        if self.end is not None:
            self.task = asyncio.get_running_loop().create_task(self.end())
            self.end = None


@pytest.mark.parametrize("fast_loop", [True, False])
def test_what_has_come_before_the_end_is_answered_and_nothing_is_read_after_it(fast_loop: bool) -> None:
    service = Ending()
    count = 400  # few enough for one segment: what came, came together
    with serving(service, fast_loop=fast_loop) as served, connect(served) as sock:
        service.end = partial(served.server.aclose, grace_ms=20_000, linger_ms=20_000)
        sock.sendall(framed(packed("ping", {})) * count)
        replies = []
        while data := sock.recv(1 << 16):
            replies.append(data)
        codes = b"".join(replies)
        answered = codes.count(b"draining") + service.handled
        assert codes.count(b"draining") > 0
        assert answered == codes.count(b"\xa2id") == count
        assert count > 2 * MESSAGES_PER_TURN


def test_connections_beyond_the_bound_are_let_go_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, served: Served
) -> None:
    monkeypatch.setattr("xkv_rpc.listener.CONNECTIONS_MAX", 1)
    host, _, port = served.endpoint.removeprefix("tcp://").rpartition(":")
    with connect(served) as first:
        for _ in range(10):
            with socket.create_connection((host, int(port)), HANG_S) as other:
                assert other.recv(1) == b""
        first.sendall(framed(packed("ping", {})))
        assert ask(first)["ok"]
    assert [record.message for record in caplog.records].count(
        "more than 1 connections: one more is let go"
    ) == 1
