"""Regions: only sealed memory of the told size is taken, bytes go where they should, and nothing outlives its use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import pytest_asyncio
import uvloop

from tests.rpc.harness import DictService
from tests.rpc.test_codec import HOSTILE
from xkv_rpc.client import AsyncClient
from xkv_rpc.errors import ErrorCode, RegionRefusedError, RpcError
from xkv_rpc.messages import Limits, LoadStatus, StoreStatus
from xkv_rpc.region_client import Region
from xkv_rpc.regions import RegionLimits, RegionServer
from xkv_rpc.server import Server
from xkv_rpc.session import ClientOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MIB = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
ATTACH: dict[str, Any] = {"v": 1, "op": "attach", "bytes": MIB}
HANG_S = 60.0


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RegionServer]:
    limits = RegionLimits(connections=4, region_bytes=2 * MIB, total_bytes=3 * MIB, attach_timeout_ms=20_000)
    server = RegionServer(str(tmp_path / "r.sock"), entropy=os.urandom, limits=limits)
    await server.start()
    yield server
    await server.aclose()
    assert len(server) == 0


def memfd(size: int = MIB, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in callbacks without an event
            await asyncio.sleep(0.001)


def exchange(path: str, message: bytes, descriptors: list[int]) -> tuple[dict[str, Any], bool]:
    """Send a message; returns the answer, and whether the connection was closed after it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(HANG_S)
        connection.connect(path)
        socket.send_fds(connection, [message], descriptors)
        answer = msgpack.unpackb(connection.recv(4096))
        if answer["ok"]:
            return answer, False
        return answer, connection.recv(1) == b""


async def refused(server: RegionServer, message: bytes, descriptors: list[int]) -> None:
    before = server.refused
    try:
        answer, closed = await asyncio.to_thread(exchange, server.path, message, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert answer["ok"] is False
    assert isinstance(answer["error"], str)
    assert set(answer) == {"ok", "error"}
    assert closed
    assert server.refused == before + 1
    assert (len(server), server.mapped_bytes) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": True},
        {"op": "detach"},
        {"op": b"attach"},
        {"bytes": 0},
        {"bytes": -1},
        {"bytes": True},
        {"bytes": "1"},
        {"bytes": MIB - 1},
        {"bytes": MIB + 1},
        {"bytes": 2**63},
        {"extra": 1},
    ],
)
async def test_an_attach_message_that_is_wrong_is_refused(
    server: RegionServer, change: dict[str, Any]
) -> None:
    await refused(server, msgpack.packb({**ATTACH, **change}), [memfd()])


@pytest.mark.parametrize("missing", ["v", "op", "bytes"])
async def test_an_attach_message_without_a_field_is_refused(server: RegionServer, missing: str) -> None:
    message = {name: value for name, value in ATTACH.items() if name != missing}
    await refused(server, msgpack.packb(message), [memfd()])


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in {"empty", "very deep"}])
async def test_hostile_bytes_are_refused(server: RegionServer, name: str) -> None:
    await refused(server, HOSTILE[name], [memfd()])


async def test_a_message_that_is_too_long_is_refused(server: RegionServer) -> None:
    await refused(server, msgpack.packb({**ATTACH, "x": "y" * 1000}), [memfd()])


@pytest.mark.parametrize("count", [0, 2, 8, 9, 60])
async def test_any_number_of_descriptors_but_one_is_refused_and_none_leaks(
    server: RegionServer, count: int
) -> None:
    before = descriptors()
    await refused(server, msgpack.packb(ATTACH), [memfd() for _ in range(count)])
    await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, SEALS | fcntl.F_SEAL_WRITE])
async def test_memory_with_the_wrong_seals_is_refused(server: RegionServer, seals: int) -> None:
    await refused(server, msgpack.packb(ATTACH), [memfd(seals=seals)])


async def test_what_is_not_a_memfd_is_refused(server: RegionServer) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(MIB)
        await refused(server, msgpack.packb(ATTACH), [os.dup(file.fileno())])
    read_end, write_end = os.pipe()
    os.close(write_end)
    await refused(server, msgpack.packb(ATTACH), [read_end])


async def test_a_region_that_is_too_large_is_refused(server: RegionServer) -> None:
    await refused(server, msgpack.packb({**ATTACH, "bytes": 2 * MIB + 1}), [memfd(2 * MIB + 1)])


async def test_regions_of_all_clients_together_are_bounded_and_room_comes_back(server: RegionServer) -> None:
    first = await asyncio.to_thread(Region.attach, server.path, 2 * MIB)
    with pytest.raises(RegionRefusedError):
        await asyncio.to_thread(Region.attach, server.path, 2 * MIB)
    second = await asyncio.to_thread(Region.attach, server.path, MIB)
    assert (len(server), server.mapped_bytes) == (2, 3 * MIB)
    first.close()
    await until(lambda: server.mapped_bytes == MIB)
    second.close()
    await until(lambda: server.mapped_bytes == 0)


async def test_connections_are_bounded(server: RegionServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            idle.connect(server.path)
        await until(lambda: len(server._clients) == 4)
        with pytest.raises(RegionRefusedError):
            await asyncio.to_thread(Region.attach, server.path, MIB)
    await until(lambda: len(server._clients) == 0)


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    limits = RegionLimits(attach_timeout_ms=10)
    server = RegionServer(str(tmp_path / "r.sock"), entropy=os.urandom, limits=limits)
    await server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.settimeout(HANG_S)
        silent.connect(server.path)
        answer = msgpack.unpackb(await asyncio.to_thread(silent.recv, 4096))
        assert answer["ok"] is False
        assert await asyncio.to_thread(silent.recv, 1) == b""
    await server.aclose()


async def test_a_second_message_ends_the_region(server: RegionServer) -> None:
    region = await asyncio.to_thread(Region.attach, server.path, MIB)
    region._connection.settimeout(HANG_S)
    region._connection.send(msgpack.packb(ATTACH))
    answer = msgpack.unpackb(await asyncio.to_thread(region._connection.recv, 4096))
    assert answer["ok"] is False
    await until(lambda: len(server) == 0)
    with pytest.raises(RpcError) as caught:
        server.find(region.token)
    assert (caught.value.code, caught.value.field) == (ErrorCode.UNKNOWN_REGION, "region")
    region.close()


def test_a_client_that_ends_with_its_answer_unread_is_noticed(tmp_path: Path) -> None:
    """Its socket says that by an error, of which uvloop tells once."""

    async def play() -> None:
        server = RegionServer(str(tmp_path / "r.sock"), entropy=os.urandom)
        await server.start()
        for said in (msgpack.packb(ATTACH), msgpack.packb({**ATTACH, "bytes": 0})):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(server.path)
                descriptor = memfd()
                socket.send_fds(client, [said], [descriptor])
                os.close(descriptor)
                await until(lambda: bool(select.select([client], [], [], 0)[0]))
            await until(lambda: not server._clients)
            assert len(server) == server.mapped_bytes == 0
        await server.aclose()

    uvloop.run(play())


async def test_both_sides_see_the_same_bytes_and_only_within_the_region(server: RegionServer) -> None:
    with await asyncio.to_thread(Region.attach, server.path, MIB) as region:
        mapped = server.find(region.token)
        region.view[10:15] = b"hello"
        assert bytes(mapped.view(10, 5)) == b"hello"
        mapped.view(MIB - 2, 2)[:] = b"by"
        assert bytes(region.view[-2:]) == b"by"
        assert len(mapped.view(MIB, 0)) == 0
        for offset, length in ((0, MIB + 1), (MIB, 1), (MIB - 1, 2), (2**64 - 1, 1), (0, 2**64 - 1), (-1, 1)):
            with pytest.raises(RpcError) as caught:
                mapped.view(offset, length)
            assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_REQUEST, "offsets")


async def test_a_pinned_region_stays_mapped_after_its_client_is_gone(server: RegionServer) -> None:
    region = await asyncio.to_thread(Region.attach, server.path, MIB)
    mapped = server.find(region.token)
    mapped.pin()
    mapped.pin()
    view = mapped.view(0, 4)
    region.close()
    await until(lambda: not mapped.attached)
    view[:] = b"late"
    with pytest.raises(RpcError):
        server.find(region.token)
    mapped.unpin()
    assert server.mapped_bytes == MIB
    view.release()
    mapped.unpin()
    assert server.mapped_bytes == 0
    with pytest.raises(AssertionError):
        mapped.pin()


async def test_a_view_that_is_still_held_never_dangles(server: RegionServer) -> None:
    region = await asyncio.to_thread(Region.attach, server.path, MIB)
    mapped = server.find(region.token)
    view = mapped.view(0, 4)
    region.close()
    await until(lambda: server.mapped_bytes == 0)
    view[:] = b"safe"
    assert bytes(view) == b"safe"


async def test_tokens_are_different_and_belong_to_whoever_holds_them(server: RegionServer) -> None:
    one = await asyncio.to_thread(Region.attach, server.path, MIB)
    two = await asyncio.to_thread(Region.attach, server.path, MIB)
    assert one.token != two.token
    assert {len(one.token), len(two.token)} == {16}
    assert one.token.hex() not in repr(one)
    assert server.find(one.token) is not server.find(two.token)
    one.close()
    two.close()


async def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RegionRefusedError):
        await asyncio.to_thread(Region.attach, str(tmp_path / "nothing"), MIB)


async def test_load_and_store_go_through_a_region(server: RegionServer) -> None:
    service = DictService(regions=server)
    control = Server(service, Limits(), clock=_clock)
    [endpoint] = await control.bind(["tcp://127.0.0.1:0"])
    async with AsyncClient(endpoint, ClientOptions(20_000, 20_000)) as client:
        with await client.attach_region(MIB) as region:
            region.view[0:3] = b"abc"
            region.view[100:104] = b"defg"
            stored = await client.store_from("", b"", [b"1", b"2"], [3, 4], region.token, [0, 100])
            assert stored == [StoreStatus.STORED] * 2
            assert service.objects["", b"", b"2"] == b"defg"
            keys = [b"2", b"0", b"1"]
            loaded = await client.load_into("", b"", keys, region.token, [500, 600, 700], [10, 10, 3])
            assert loaded.statuses == [LoadStatus.OK, LoadStatus.MISS, LoadStatus.OK]
            assert loaded.payloads == [None, None, None]
            assert bytes(region.view[500:504]) == b"defg"
            assert bytes(region.view[700:703]) == b"abc"
            for token, offset, code in ((b"?" * 16, 0, "unknown_region"), (region.token, MIB, "bad_request")):
                with pytest.raises(RpcError) as caught:
                    await client.load_into("", b"", [b"1"], token, [offset], [3])
                assert caught.value.code == code
    await control.aclose()
    await until(lambda: len(server) == 0)


def _clock() -> int:
    return int(asyncio.get_running_loop().time() * 1e9)


async def test_a_gateway_without_regions_says_so() -> None:
    control = Server(DictService(), Limits(), clock=_clock)
    [endpoint] = await control.bind(["tcp://127.0.0.1:0"])
    async with AsyncClient(endpoint, ClientOptions(20_000, 20_000)) as client:
        with pytest.raises(RegionRefusedError):
            await client.attach_region(MIB)
    await control.aclose()


async def test_whether_a_region_is_attached_is_known_at_once(server: RegionServer) -> None:
    region = await asyncio.to_thread(Region.attach, server.path, MIB, timeout_ms=3_600_000)
    async with asyncio.timeout(HANG_S):
        assert await asyncio.to_thread(lambda: region.attached)
    region.close()
    await until(lambda: len(server) == 0)
