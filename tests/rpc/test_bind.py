"""Addresses: what is stale is replaced, what is live is refused, and what is no socket is never touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from tests.ports import held_port
from tests.rpc.harness import DictService, RawClient, serving
from tests.rpc.test_codec import packed
from xkv_rpc.errors import (
    AddressInUseError,
    BadEndpointError,
    EndpointError,
    NotASocketError,
    SocketPathTooLongError,
)
from xkv_rpc.messages import Limits
from xkv_rpc.regions import RegionServer
from xkv_rpc.server import Server
from xkv_rpc.unixpath import bind_listener

if TYPE_CHECKING:
    from pathlib import Path

PING = packed("ping", {})


async def refused(*endpoints: str) -> EndpointError:
    server = Server(DictService(), Limits(), clock=time.monotonic_ns)
    with pytest.raises(EndpointError) as caught:
        await server.bind(endpoints)
    return caught.value


def stale_socket(path: Path, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as left_behind:
        left_behind.bind(str(path))


def test_tcp_over_both_families_and_a_unix_socket_serve_together(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    endpoints = ["tcp://127.0.0.1:0", f"ipc://{path}"]
    if _has_ipv6():
        endpoints.append("tcp://[::1]:0")
    with serving(DictService(), endpoints=endpoints) as served:
        assert not any(endpoint.endswith(":0") for endpoint in served.endpoints)
        for endpoint in served.endpoints:
            with RawClient(endpoint, IPV6=1) as client:
                assert client.ask(PING)["ok"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_tcp_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = await refused(endpoint)
    assert isinstance(error, AddressInUseError)
    assert error.address == endpoint
    assert endpoint in str(error)


async def test_a_partial_bind_leaves_nothing_bound(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    blocker = tmp_path / "blocker"
    blocker.write_text("mine")
    with held_port() as port:
        await refused(f"tcp://127.0.0.1:{port}", f"ipc://{path}", f"ipc://{blocker}")
        assert not path.exists()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:1",
        "inproc://x",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://no.such.name.invalid:1",
        "ipc://",
        "ipc://@x",
        "ipc://*",
    ],
)
async def test_an_address_that_cannot_be_served_is_named(endpoint: str) -> None:
    error = await refused(endpoint)
    assert isinstance(error, BadEndpointError)


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    stale_socket(path, socket.SOCK_STREAM)
    assert path.exists()
    with serving(DictService(), endpoints=[f"ipc://{path}"]) as served, RawClient(served.endpoint) as client:
        assert client.ask(PING)["ok"]


async def test_a_live_unix_socket_is_refused_and_keeps_its_clients(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with serving(DictService(), endpoints=[f"ipc://{path}"]) as served, RawClient(served.endpoint) as client:
        assert client.ask(PING)["ok"]
        assert isinstance(await refused(f"ipc://{path}"), AddressInUseError)
        assert client.ask(PING)["ok"]
        with RawClient(served.endpoint) as late:
            assert late.ask(PING)["ok"]


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_link(path: Path) -> None:
    target = path.with_name("target")
    stale_socket(target, socket.SOCK_STREAM)
    path.symlink_to(target)


@pytest.mark.parametrize("make", [make_file, make_link, os.mkdir, os.mkfifo])
async def test_what_is_not_a_socket_is_never_deleted(tmp_path: Path, make: object) -> None:
    path = tmp_path / "control.sock"
    assert callable(make)
    make(path)
    before = path.lstat()
    assert isinstance(await refused(f"ipc://{path}"), NotASocketError)
    with pytest.raises(NotASocketError):
        await RegionServer(str(path), entropy=os.urandom).start()
    assert path.lstat().st_ino == before.st_ino


async def test_a_path_that_is_too_long_or_leads_nowhere_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    assert isinstance(await refused(f"ipc://{long}"), SocketPathTooLongError)
    with pytest.raises(SocketPathTooLongError):
        await RegionServer(str(long), entropy=os.urandom).start()
    assert isinstance(await refused(f"ipc://{tmp_path}/no/such"), BadEndpointError)


async def test_the_region_socket_follows_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "regions.sock"
    stale_socket(path, socket.SOCK_SEQPACKET)
    server = RegionServer(str(path), entropy=os.urandom)
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(AddressInUseError):
        await RegionServer(str(path), entropy=os.urandom).start()
    await server.aclose()
    assert not path.exists()


async def test_a_server_does_not_remove_a_path_that_another_one_has_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "regions.sock"
    server = RegionServer(str(path), entropy=os.urandom)
    await server.start()
    path.unlink()
    stale_socket(path, socket.SOCK_SEQPACKET)
    await server.aclose()
    assert path.exists()


async def test_closing_twice_waits_for_the_same_end() -> None:
    server = Server(DictService(), Limits(), clock=time.monotonic_ns)
    await server.bind(["tcp://127.0.0.1:0"])
    await asyncio.gather(server.aclose(), server.aclose())
    await server.aclose()


def test_hundreds_of_clients_that_do_not_block_can_connect_while_the_server_is_busy(tmp_path: Path) -> None:
    listener = bind_listener(str(tmp_path / "r.sock"), socket.SOCK_SEQPACKET, 0o600)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        for _ in range(300):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            client.connect(listener.getsockname())
