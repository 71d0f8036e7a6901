"""Who gets in: by the address really seen, or by key; what a key may touch; what happens when it is revoked."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.rpc.curve import Keyring, raw_client
from tests.rpc.harness import HANG_S, DictService, RawClient, serving, wait_until
from tests.rpc.test_codec import packed
from xkv_rpc import zmtp
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client import Client, ClientOptions
from xkv_rpc.doors import EVERYTHING, OPEN_USER, Admits, Door, Doorkeeper, Grant, Knock, Visit
from xkv_rpc.errors import (
    CircuitOpenError,
    ErrorCode,
    GatewayUnavailableError,
    KeyRefusedError,
    RpcError,
    XkvRpcError,
)
from xkv_rpc.messages import Limits
from xkv_rpc.porter import new_key_pair
from xkv_rpc.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PING = packed("ping", {})
PATIENT = {"timeout_ms": 10_000, "connect_timeout_ms": 10_000}
KEY = "k" * 40


def knock(domain: str, mechanism: str = "NULL", address: str = "127.0.0.1", key: str = "") -> Knock:
    return Knock(domain, address, mechanism, key)


# --- judgement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_a_peer_on_loopback_gets_into_a_loopback_endpoint(address: str) -> None:
    assert Doorkeeper().judge(knock("loopback", address=address)).admitted


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "0.0.0.0", "", "localhost", "127.0.0.1.x", "::"],
)
def test_any_other_peer_does_not(address: str) -> None:
    assert not Doorkeeper().judge(knock("loopback", address=address)).admitted


def test_every_pair_of_endpoint_and_mechanism_that_does_not_belong_together_is_refused() -> None:
    doorkeeper = Doorkeeper()
    doorkeeper.replace({KEY: Grant("alice", None)})
    admitted = {
        (domain, mechanism)
        for domain in (*Admits, "", "other")
        for mechanism in ("NULL", "CURVE", "PLAIN", "GSSAPI", "")
        if doorkeeper.judge(knock(domain, mechanism, key=KEY)).admitted
    }
    assert admitted == {
        (Admits.LOOPBACK, "NULL"),
        (Admits.ANYONE, "NULL"),
        (Admits.LOCAL, "NULL"),
        (Admits.KEYS, "CURVE"),
    }


def test_a_key_gets_in_while_it_is_known_and_touches_what_it_was_granted() -> None:
    seen: list[Visit] = []
    doorkeeper = Doorkeeper(seen.append)
    assert not doorkeeper.judge(knock("keys", "CURVE", "10.0.0.1", KEY)).admitted
    doorkeeper.replace({KEY: Grant("alice", frozenset({"a", ""}))})
    visit = doorkeeper.judge(knock("keys", "CURVE", "10.0.0.1", KEY))
    assert (visit.admitted, visit.name, visit.user) == (True, "alice", KEY)
    grant = doorkeeper.grant_of(visit.user)
    assert grant is not None
    assert (grant.covers("a"), grant.covers(""), grant.covers("aa")) == (True, True, False)
    doorkeeper.replace({})
    assert doorkeeper.grant_of(visit.user) is None
    assert doorkeeper.grant_of(OPEN_USER) is EVERYTHING
    assert doorkeeper.grant_of("") is None
    assert (doorkeeper.admitted, doorkeeper.refused, len(seen)) == (1, 1, 2)


def test_secrets_are_in_no_representation() -> None:
    keyring = Keyring()
    keys = keyring.new("alice")
    text = repr((keyring.door(), keys, ClientOptions(keys=keys)))
    assert keyring.server.secret not in text
    assert keys.pair.secret not in text


# --- over sockets ---------------------------------------------------------------------------------------------


def test_open_and_curve_endpoints_serve_side_by_side(tmp_path: Path) -> None:
    keyring = Keyring()
    alice = keyring.new("alice", "a")
    unix = Door(f"ipc://{tmp_path}/c.sock", Admits.LOCAL, mode=0o660, group=os.getgid())
    doors = ["tcp://127.0.0.1:0", keyring.door(), unix]
    with serving(DictService(), endpoints=doors, doorkeeper=keyring.doorkeeper) as served:
        mode = (tmp_path / "c.sock").stat()
        assert (stat.S_IMODE(mode.st_mode), mode.st_gid) == (0o660, os.getgid())
        for endpoint in (served.endpoints[0], served.endpoints[2]):
            with Client(endpoint, ClientOptions(**PATIENT)) as client:
                client.store("b", b"", [b"k"], [b"open"])
                assert client.load("b", b"", [b"k"]).payloads[0] == b"open"
        with Client(served.endpoints[1], ClientOptions(**PATIENT, keys=alice)) as client:
            client.store("a", b"", [b"k"], [b"closed" * 50_000])
            assert client.load("a", b"", [b"k"]).payloads[0] == b"closed" * 50_000
            for request in (
                lambda: client.lookup("b", b"", [b"k"]),
                lambda: client.load("b", b"", [b"k"]),
                lambda: client.store("b", b"", [b"x"], [b"x"]),
                lambda: client.delete("b", b"", [b"k"]),
            ):
                with pytest.raises(RpcError, match="may not touch") as caught:
                    request()
                assert caught.value.code is ErrorCode.FORBIDDEN
        with Client(served.endpoints[0], ClientOptions(**PATIENT)) as client:
            assert client.lookup("b", b"", [b"k"]).hits == 1
    assert not (tmp_path / "c.sock").exists()


def test_forbidden_says_the_same_whether_anything_is_there_or_not() -> None:
    keyring = Keyring()
    service = DictService()
    service.objects["b", b"", b"there"] = b"x"
    doors = [keyring.door()]
    with (
        serving(service, endpoints=doors, doorkeeper=keyring.doorkeeper) as served,
        raw_client(served.endpoint, keyring.new("alice", "a")) as client,
    ):
        answers = [
            client.ask(packed("lookup", {"ns": namespace, "scope": b"", "keys": [key]}))
            for namespace in ("b", "nothing")
            for key in (b"there", b"gone")
        ]
        assert all(answer == answers[0] for answer in answers)
        assert answers[0]["error"]["code"] == "forbidden"
        assert service.handled == 0


def test_neither_a_stranger_nor_a_client_without_keys_reaches_the_handler() -> None:
    keyring = Keyring()
    service = DictService()
    known = keyring.new("alice")
    with serving(service, endpoints=[keyring.door()], doorkeeper=keyring.doorkeeper) as served:
        with (
            RawClient(served.endpoint, RECONNECT_IVL=5) as plain,
            raw_client(served.endpoint, keyring.stranger(), RECONNECT_IVL=5) as stranger,
            raw_client(served.endpoint, known) as client,
        ):
            plain.send(PING)
            stranger.send(PING)
            wait_until(lambda: keyring.doorkeeper.refused >= 1, "the stranger is judged")
            assert client.ask(PING)["ok"]
            assert plain.receive_frames(0.1) is None
            assert stranger.receive_frames(0.1) is None
        options = ClientOptions(timeout_ms=10_000, connect_timeout_ms=10_000)
        with (
            Client(served.endpoint, ClientOptions(**PATIENT, keys=keyring.stranger())) as strange,
            pytest.raises(KeyRefusedError),
        ):
            strange.ping()
        with (
            Client(served.endpoint, options) as plain_client,
            pytest.raises(XkvRpcError, match=r"mechanism|handshake"),
        ):
            plain_client.ping()
        assert service.handled == 1


def test_a_client_refuses_a_server_with_another_key() -> None:
    keyring, other = Keyring(), Keyring()
    impatient = ClientOptions(
        timeout_ms=400,
        connect_timeout_ms=400,
        backoff_min_ms=3_600_000,
        backoff_max_ms=3_600_000,
        keys=other.new("alice"),
    )
    with (
        serving(DictService(), endpoints=[keyring.door()], doorkeeper=keyring.doorkeeper) as served,
        Client(served.endpoint, impatient) as client,
    ):
        with pytest.raises(GatewayUnavailableError):
            client.ping()
        with pytest.raises(CircuitOpenError):
            client.ping()


def test_a_revoked_key_is_out_at_once_also_on_an_open_connection() -> None:
    keyring = Keyring()
    alice, bob = keyring.new("alice"), keyring.new("bob")
    service = DictService()
    with (
        serving(service, endpoints=[keyring.door()], doorkeeper=keyring.doorkeeper) as served,
        raw_client(served.endpoint, alice) as first,
        raw_client(served.endpoint, bob) as second,
    ):
        assert first.ask(PING)["ok"]
        assert second.ask(PING)["ok"]
        served.run(lambda: keyring.revoke(alice))
        assert first.ask(PING)["error"]["code"] == "unauthorized"
        assert second.ask(PING)["ok"]
        # A new key under the old name does not bring the old key back.
        served.run(lambda: keyring.new("alice"))
        assert first.ask(PING)["error"]["code"] == "unauthorized"
        assert service.handled == 3


def test_what_a_peer_says_itself_about_who_it_is_does_not_count() -> None:
    """The property that the porter sets can also be sent by a peer, in its handshake."""
    keyring = Keyring()
    alice = keyring.new("alice", "a")
    ready = (
        b"\x05READY"
        + zmtp._property(b"Socket-Type", b"DEALER")
        + zmtp._property(b"User-Id", alice.pair.public.encode())
    )
    doors: list[str | Door] = ["tcp://127.0.0.1:0", keyring.door()]
    with serving(DictService(), endpoints=doors, doorkeeper=keyring.doorkeeper) as served:
        host, _, port = served.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
            frame = packed("lookup", {"ns": "b", "scope": b"", "keys": [b"k"]})
            connection.sendall(zmtp.GREETING + bytes((zmtp.COMMAND, len(ready))) + ready)
            answer = b""
            while b"READY" not in answer:
                answer += connection.recv(4096) or pytest.fail("closed")
            connection.sendall(zmtp.frame_head(len(frame), more=False) + frame)
            while b"hits" not in answer and b"error" not in answer:
                answer += connection.recv(4096) or pytest.fail("closed")
    # The endpoint is open, and that is what counts: as alice it would have been forbidden.
    assert b"hits" in answer


async def test_the_asyncio_client_speaks_curve_as_well() -> None:
    keyring = Keyring()
    keys = keyring.new("alice", "a")
    with serving(DictService(), endpoints=[keyring.door()], doorkeeper=keyring.doorkeeper) as served:
        async with AsyncClient(served.endpoint, ClientOptions(**PATIENT, keys=keys)) as client:
            await client.store("a", b"", [b"k"], [b"bytes"])
            assert (await client.load("a", b"", [b"k"])).payloads[0] == b"bytes"
            with pytest.raises(RpcError, match="may not touch"):
                await client.lookup("b", b"", [b"k"])
        strange = ClientOptions(timeout_ms=300, connect_timeout_ms=300, keys=keyring.stranger())
        async with AsyncClient(served.endpoint, strange) as client:
            with pytest.raises(GatewayUnavailableError):
                await client.ping()


def test_a_blocking_client_with_keys_survives_a_restart_of_the_server_and_a_close_from_elsewhere() -> None:
    keyring = Keyring()
    keys = keyring.new("alice")
    options = ClientOptions(**PATIENT, keys=keys, backoff_min_ms=1, backoff_max_ms=1, probe_timeout_ms=5000)
    service = DictService()
    with serving(service, endpoints=[keyring.door()], doorkeeper=keyring.doorkeeper) as served:
        endpoint = served.endpoint
        client = Client(endpoint, options)
        client.ping()
    with serving(service, endpoints=[keyring.door(endpoint)], doorkeeper=keyring.doorkeeper) as served:
        client.ping()
        service.hold = True
        served.loop.call_soon_threadsafe(served.loop.call_later, 0.05, client.close)
        with pytest.raises(Exception, match="closed"):
            client.ping()
        client.close()


def test_the_loop_keeps_serving_while_strangers_knock() -> None:
    keyring = Keyring()
    with serving(
        DictService(), endpoints=["tcp://127.0.0.1:0", keyring.door()], doorkeeper=keyring.doorkeeper
    ) as served:
        strangers = [raw_client(served.endpoints[1], keyring.stranger()) for _ in range(60)]
        try:
            with Client(served.endpoints[0], ClientOptions(**PATIENT)) as client:
                ends = time.monotonic() + HANG_S
                while keyring.doorkeeper.refused < len(strangers) and time.monotonic() < ends:
                    client.ping()
        finally:
            for stranger in strangers:
                stranger.__exit__()
    assert keyring.doorkeeper.refused >= len(strangers)


async def test_where_nobody_can_judge_nothing_is_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = Server(DictService(), Limits(), clock=time.monotonic_ns, doorkeeper=Doorkeeper())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(server._loop, "run_in_executor", lambda _, function: _in_place(function))
    with pytest.raises(RuntimeError, match="thread"):
        await server.bind(
            [f"ipc://{tmp_path}/c.sock", Door("tcp://127.0.0.1:0", Admits.KEYS, new_key_pair())]
        )
    assert not (tmp_path / "c.sock").exists()


async def _in_place(function: Callable[[], None]) -> None:
    function()
