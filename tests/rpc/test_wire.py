"""The blocking client's own ZMTP: against libzmq, and against peers that do what libzmq never would."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ports import held_port
from tests.rpc.harness import HANG_S, DictService, serving, wait_until
from xkv_rpc import zmtp
from xkv_rpc.client import Client
from xkv_rpc.errors import (
    BadReplyError,
    CallTimeoutError,
    ConnectionLostError,
    GatewayUnavailableError,
    GatewayUnreachableError,
    XkvRpcError,
)
from xkv_rpc.messages import StoreStatus
from xkv_rpc.names import LOOKUPS_MAX
from xkv_rpc.session import BreakerState, ClientOptions
from xkv_rpc.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENT = ClientOptions(timeout_ms=20_000, connect_timeout_ms=20_000)
READY = zmtp.ready(b"ROUTER")
GREETING_31 = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def framed(body: bytes, flags: int = 0) -> bytes:
    return bytes((flags | zmtp.LONG,)) + struct.pack(">Q", len(body)) + body


def reply_to(request: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb({"v": 1, "id": request["id"], "ok": True}))


class Peer:
    """The gateway's end of one connection, as a script sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.stream = connection.makefile("rb")

    def send(self, raw: bytes) -> None:
        self.connection.sendall(raw)

    def say(self, raw: bytes) -> None:
        """Send, and listen until the client hangs up: hanging up first would race with what was sent."""
        self.send(raw)
        self.stream.read()

    def shake(self, greeting: bytes = GREETING_31) -> None:
        self.send(greeting)
        assert self.stream.read(64) == zmtp.GREETING
        self.send(READY)
        assert self.frame()[1].startswith(b"\x05READY")

    def frame(self) -> tuple[int, bytes]:
        flags, size = self.stream.read(2)
        if flags & zmtp.LONG:
            size = int.from_bytes(bytes((size,)) + self.stream.read(7), "big")
        return flags, self.stream.read(size)

    def request(self) -> dict[str, Any]:
        header = msgpack.unpackb(self.frame()[1])
        assert isinstance(header, dict)
        return header


@contextlib.contextmanager
def scripted(script: Callable[[Peer], None]) -> Iterator[str]:
    """Run a script for the first connection; the connection ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HANG_S)

        def run() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.settimeout(HANG_S)
                peer = Peer(connection)
                with peer.stream:
                    script(peer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(HANG_S)
            assert not thread.is_alive()


def outcome(script: Callable[[Peer], None], options: ClientOptions = PATIENT) -> XkvRpcError | None:
    with scripted(script) as endpoint, Client(endpoint, options) as client:
        try:
            client.ping()
        except XkvRpcError as error:
            return error
    return None


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n".ljust(64),
        GREETING_31.replace(b"NULL\0", b"CURVE"),
        GREETING_31[:10] + b"\x01\x00" + GREETING_31[12:],
        bytes(64),
    ],
)
def test_what_does_not_speak_our_zmtp_is_said_so(greeting: bytes) -> None:
    assert isinstance(outcome(lambda peer: peer.say(greeting)), BadReplyError)


@pytest.mark.parametrize(
    "handshake",
    [
        b"\x04\x06\x05ERROR",
        zmtp.ready(b"DEALER"),
        b"\x00\x02hi",
        b"\x06" + struct.pack(">Q", 2**62),
        b"\x04\x00",
        b"\xff\xff",
    ],
)
def test_a_handshake_that_goes_wrong_is_said_so(handshake: bytes) -> None:
    assert isinstance(outcome(lambda peer: peer.say(GREETING_31 + handshake)), BadReplyError)


@pytest.mark.parametrize("kept", [0, 10, 64, 70])
def test_a_peer_that_hangs_up_during_the_handshake_is_unreachable(kept: int) -> None:
    error = outcome(lambda peer: peer.send((GREETING_31 + READY)[:kept]))
    assert isinstance(error, GatewayUnreachableError)


def test_a_peer_that_accepts_and_says_nothing_is_unreachable_in_time() -> None:
    options = ClientOptions(timeout_ms=20_000, connect_timeout_ms=50)
    started = time.monotonic()
    assert isinstance(outcome(lambda peer: peer.stream.read() and None, options), GatewayUnreachableError)
    assert time.monotonic() - started < 10


def test_a_name_server_that_is_silent_costs_a_call_no_more_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    asked: list[str] = []

    def silent(host: str) -> str:
        asked.append(host)
        assert over.wait(HANG_S)
        return "127.0.0.1"

    monkeypatch.setattr(socket, "gethostbyname", silent)
    options = ClientOptions(timeout_ms=100, connect_timeout_ms=50, backoff_min_ms=1, backoff_max_ms=1)
    with Client("tcp://gateway.example:1", options) as client:
        said = ""
        while "name servers" not in said:
            with pytest.raises(GatewayUnavailableError) as caught:
                client.ping()
            said = str(caught.value)
    assert len(asked) == LOOKUPS_MAX, "those that hang are few"
    over.set()
    wait_until(lambda: "name-lookup" not in {thread.name for thread in threading.enumerate()}, "still there")


def test_a_name_is_looked_up_and_one_that_stands_for_nothing_is_said() -> None:
    with serving(DictService()) as served:
        port = served.endpoint.rpartition(":")[2]
        with Client(f"tcp://localhost:{port}", PATIENT) as client:
            client.ping()
    for name in ("no-such-host.invalid", "x" * 70 + ".invalid"):
        with Client(f"tcp://{name}:1", PATIENT) as client, pytest.raises(GatewayUnreachableError):
            client.ping()


def test_a_refused_connection_is_heard_at_once() -> None:
    started = time.monotonic()
    with (
        held_port() as port,
        Client(f"tcp://127.0.0.1:{port}", PATIENT) as client,
        pytest.raises(GatewayUnreachableError),
    ):
        client.ping()
    assert time.monotonic() - started < 10


def test_a_reply_that_comes_byte_by_byte_is_the_same() -> None:
    def script(peer: Peer) -> None:
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GREETING_31 + READY:
            peer.send(bytes((byte,)))
        peer.stream.read(64)
        peer.frame()
        for byte in framed(reply_to(peer.request())):
            peer.send(bytes((byte,)))

    assert outcome(script) is None


def test_heartbeats_are_answered_and_do_not_disturb() -> None:
    pongs = []

    def script(peer: Peer) -> None:
        peer.shake()
        request = peer.request()
        peer.send(b"\x04\x0a\x04PING\x00\x0aabc" + b"\x04\x05\x04SEED" + framed(reply_to(request)))
        pongs.append(peer.frame())

    assert outcome(script) is None
    assert pongs == [(zmtp.COMMAND, b"\x04PONGabc")]


@pytest.mark.parametrize(
    "answer",
    [
        b"\x02" + struct.pack(">Q", 2**63),
        b"\x06" + struct.pack(">Q", 2**20),
        b"\x80\x00",
        b"\x05\x00",
        framed(b"\xc1"),
        framed(b""),
    ],
)
def test_traffic_that_is_no_reply_is_a_bad_reply(answer: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.shake()
        peer.request()
        peer.say(answer)

    assert isinstance(outcome(script), BadReplyError)


@pytest.mark.parametrize("kept", [0, 1, 5, 12])
def test_a_connection_that_ends_before_the_reply_is_heard_at_once(kept: int) -> None:
    def script(peer: Peer) -> None:
        peer.shake()
        peer.send(framed(reply_to(peer.request()))[:kept])

    assert isinstance(outcome(script), ConnectionLostError)


def test_a_peer_that_reads_nothing_costs_a_large_store_its_deadline() -> None:
    done = threading.Event()

    def script(peer: Peer) -> None:
        peer.shake()
        done.wait(HANG_S)

    with scripted(script) as endpoint, Client(endpoint, PATIENT) as client:
        payload = bytearray(32 << 20)
        with pytest.raises(CallTimeoutError):
            client.store("", b"", [b"k"], [payload], timeout_ms=2000)
        done.set()


def test_more_payloads_than_one_system_call_takes_arrive_whole(tmp_path: Path) -> None:
    service = DictService()
    keys = [b"%d" % number for number in range(1500)]
    payloads = [bytes((number % 256,)) * (number % 600) for number in range(1500)]
    endpoint = f"ipc://{tmp_path}/c.sock"
    with serving(service, endpoints=[endpoint]), Client(endpoint, PATIENT) as client:
        assert client.store("", b"", keys, payloads) == [StoreStatus.STORED] * 1500
        assert [bytes(p or b"") for p in client.load("", b"", keys).payloads] == payloads
        big = [bytes((n,)) * (3 << 20) for n in range(4)]
        assert client.store("", b"big", keys[:4], big) == [StoreStatus.STORED] * 4
        assert [bytes(p or b"") for p in client.load("", b"big", keys[:4]).payloads] == big


def test_an_idle_connection_that_has_ended_is_replaced_without_a_failed_call(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/c.sock"
    with Client(endpoint, PATIENT) as client:
        for _ in range(3):
            with serving(DictService(), endpoints=[endpoint]):
                client.ping()
        assert client._breaker.state is BreakerState.CLOSED


def test_a_connection_that_another_thread_shuts_down_is_lost() -> None:
    with serving(DictService()) as served:
        wire = Wire(served.endpoint, time.monotonic_ns, time.monotonic_ns() + 20_000_000_000)
        wire.shutdown()
        with pytest.raises(ConnectionLostError):
            wire.receive(time.monotonic_ns() + 20_000_000_000)
        wire.close()


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=5))
def test_a_message_is_framed_as_it_is_parsed(header: bytes, payloads: list[bytes]) -> None:
    raw = b"".join(zmtp.message(header, payloads))
    frames = []
    position = 0
    more = True
    while more:
        head = zmtp.parse_head(raw, position, len(raw))
        assert head is not None
        assert not head.command
        position += head.head_bytes
        frames.append(raw[position : position + head.body_bytes])
        position += head.body_bytes
        more = head.more
    assert position == len(raw)
    assert frames == [header, *payloads]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=12))
def test_any_head_is_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadReplyError):
        head = zmtp.parse_head(raw, 0, len(raw))
        assert head is None or 0 <= head.body_bytes < 2**64


def test_clients_that_vanish_in_the_middle_of_anything_leave_nothing_behind() -> None:
    half = framed(msgpack.packb({"v": 1, "id": 1, "op": "ping"}))
    said = zmtp.GREETING + zmtp.ready(b"DEALER") + half + half
    with serving(DictService()) as served, Client(served.endpoint, PATIENT) as client:
        client.ping()
        address = ("127.0.0.1", int(served.endpoint.rsplit(":", 1)[1]))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for cut in range(0, len(said), 2):
            with socket.create_connection(address) as vanishing:
                vanishing.sendall(said[:cut])
                # Closing without lingering resets the connection, as the death of a host does.
                vanishing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.ping()
        wait_until(
            lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 5, "descriptors are left behind"
        )
        assert served.run(lambda: len(served.server._ledger)) == 0
