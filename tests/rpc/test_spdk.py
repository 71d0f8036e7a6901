"""The calls of an SPDK target: each gets its own answer or an error that says what is known, and none holds the loop up."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.target.fake_spdk import FakeSpdk, RpcFault, fake_spdk
from xkv_rpc.spdk import (
    CONNECTIONS_MAX,
    SpdkAddress,
    SpdkBrokenError,
    SpdkBusyError,
    SpdkClient,
    SpdkError,
    SpdkRefusedError,
    SpdkTimeoutError,
    SpdkTooLargeError,
    SpdkUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.target.fake_spdk import Params

HANG_S: Final = 60.0


def echo(method: str, params: Params) -> Any:
    if method == "refuse":
        raise RpcFault(params["code"], "No such device")
    return {"method": method, "params": params}


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeSpdk]:
    async with fake_spdk(tmp_path / "spdk.sock", echo) as fake, asyncio.timeout(HANG_S):
        yield fake


@pytest.fixture
async def client(fake: FakeSpdk) -> AsyncIterator[SpdkClient]:
    client = SpdkClient(SpdkAddress(str(fake.path)), clock=time.monotonic_ns, timeout_ms=10_000)
    yield client
    client.close()


def whole(request: dict[str, Any], result: Any = "mine", number: int | None = None) -> bytes:
    answer = {"jsonrpc": "2.0", "id": request["id"] if number is None else number, "result": result}
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"


async def test_a_call_returns_its_result_and_leaves_its_parameters_alone(client: SpdkClient) -> None:
    params = {"name": "b0", "inner": {"a": [1, None]}}
    assert await client.call("bdev_get_bdevs", params) == {"method": "bdev_get_bdevs", "params": params}
    assert params == {"name": "b0", "inner": {"a": [1, None]}}
    assert await client.call("nvmf_get_transports") == {"method": "nvmf_get_transports", "params": {}}


async def test_an_error_has_the_targets_code_and_its_words(client: SpdkClient) -> None:
    with pytest.raises(SpdkRefusedError, match="refuse: No such device") as caught:
        await client.call("refuse", {"code": -19})
    assert caught.value.code == -19


def sends(*parts: Callable[[dict[str, Any]], bytes], close: bool = False) -> Any:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for part in parts:
            writer.write(part(request))
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()
        return True

    return script


SMILE: Final = "😀" * 3


@pytest.mark.parametrize(
    "script",
    [
        sends(whole),
        sends(lambda request: whole(request)[:7], lambda request: whole(request)[7:]),
        sends(lambda request: whole(request).rstrip()),
        sends(whole, close=True),
        sends(lambda request: whole(request) + whole(request, "another", 99)),
        sends(lambda request: b"\n  " + whole(request)),
        sends(*[lambda request, i=i: whole(request)[i : i + 1] for i in range(60)]),
        sends(lambda request: whole(request) + b' \t\r\n\n{"jsonrpc":"2.0","met'),
    ],
    ids=[
        "at once",
        "in two parts",
        "no newline",
        "then closed",
        "two answers at once",
        "spaces",
        "byte by byte",
        "the beginning of something else behind it",
    ],
)
async def test_an_answer_counts_however_it_arrives(client: SpdkClient, fake: FakeSpdk, script: Any) -> None:
    fake.script = script
    assert await client.call("any") == "mine"


async def test_a_character_that_is_split_over_two_parts_is_one_character(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    def at(request: dict[str, Any]) -> int:
        return whole(request, SMILE).index(SMILE.encode()) + 6

    fake.script = sends(
        lambda request: whole(request, SMILE)[: at(request)],
        lambda request: whole(request, SMILE)[at(request) :],
    )
    assert await client.call("any") == SMILE


@pytest.mark.parametrize(
    "script",
    [
        sends(lambda request: whole(request)[:-5], close=True),
        sends(lambda request: b"", close=True),
        sends(lambda request: whole(request, number=request["id"] + 1)),
        sends(lambda request: whole(request, number=7) + whole(request, number=8)),
        sends(lambda request: b'{"id":null,"error":{"code":-32700,"message":"Parse error"}}\n'),
        sends(lambda request: b"[1]}\n"),
        sends(lambda request: b'{"id":%d}\n' % request["id"]),
        sends(lambda request: b'{"id":%d,"result":"\xff"}\n' % request["id"]),
        sends(lambda request: b'{"id":1,"result":' + b"[" * 100_000 + b"}\n", close=True),
        sends(lambda request: b'{"id":1,"result":' + b"9" * 5_000 + b"}\n"),
        sends(lambda request: b'{"jsonrpc":"2.0","method":"notify","params":{}}\n' + whole(request)),
    ],
    ids=[
        "cut",
        "empty",
        "another id",
        "two others",
        "no id",
        "a list",
        "no result",
        "not UTF-8",
        "deep",
        "a number beyond all bounds",
        "a notification",
    ],
)
async def test_what_is_no_answer_is_an_error_and_the_next_call_works(
    client: SpdkClient, fake: FakeSpdk, script: Any
) -> None:
    fake.script = script
    with pytest.raises(SpdkBrokenError):
        await client.call("any")
    fake.script = None
    assert (await client.call("next"))["method"] == "next"


async def test_a_late_answer_is_never_taken_for_the_next_one(client: SpdkClient, fake: FakeSpdk) -> None:
    release = asyncio.Event()

    async def late(request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if request["method"] == "slow":
            await release.wait()
            writer.write(whole(request, "late"))
            return True
        return False

    fake.script = late
    with pytest.raises(SpdkTimeoutError):
        await client.call("slow", timeout_ms=50)
    answer = asyncio.create_task(client.call("quick"))
    release.set()
    assert (await answer)["method"] == "quick"


async def test_a_peer_that_trickles_is_held_to_the_deadline_by_the_clock(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    async def trickle(request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for _ in range(2000):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)
        return True

    fake.script = trickle
    begin = time.monotonic()
    with pytest.raises(SpdkTimeoutError):
        await client.call("any", timeout_ms=300)
    assert time.monotonic() - begin < 15, "the peer goes on for twenty seconds"


async def test_a_socket_that_this_user_may_not_use_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_self: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    client = SpdkClient(SpdkAddress(str(tmp_path / "spdk.sock")), clock=time.monotonic_ns)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", denied)
        with pytest.raises(SpdkUnreachableError, match="Permission denied") as caught:
            await client.call("any")
    assert caught.value.denied
    with pytest.raises(SpdkUnreachableError) as other:
        await client.call("any")
    assert not other.value.denied
    client.close()


async def test_no_target_a_stale_socket_and_a_dead_one_are_told_apart_from_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "spdk.sock"
    client = SpdkClient(SpdkAddress(str(path)), clock=time.monotonic_ns)
    with pytest.raises(SpdkUnreachableError, match=str(path)):
        await client.call("any")
    async with fake_spdk(path, echo) as fake:
        assert await client.call("any")

        async def dies(_: dict[str, Any], __: asyncio.StreamWriter) -> bool:
            await fake.stop()
            return True

        fake.script = dies
        with pytest.raises(SpdkBrokenError):
            await client.call("any")
    assert path.exists()
    with pytest.raises(SpdkUnreachableError, match="refused"):
        await client.call("any")
    client.close()


async def test_a_target_is_reached_over_tcp_too() -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b'{"id": 1, "result": true}')
        writer.close()

    async with await asyncio.start_server(one, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = SpdkAddress("127.0.0.1", port)
        client = SpdkClient(address, clock=time.monotonic_ns)
        assert str(address) == f"tcp://127.0.0.1:{port}"
        assert await client.call("any") is True
        client.close()
    assert str(SpdkAddress("::1", 1)) == "tcp://[::1]:1"


async def test_a_request_that_is_too_long_is_not_sent(client: SpdkClient, fake: FakeSpdk) -> None:
    with pytest.raises(SpdkTooLargeError):
        await client.call("any", {"name": "x" * 40_960})
    assert not fake.calls
    assert await client.call("any", {"name": "x" * 20_000})


async def test_many_calls_share_few_connections_and_each_gets_its_own_answer(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    results = await asyncio.gather(*(client.call("any", {"n": n}) for n in range(200)))
    assert [result["params"]["n"] for result in results] == list(range(200))
    assert fake.connections_most <= CONNECTIONS_MAX
    while fake.connections:  # noqa: ASYNC110 - the end of a thread's socket
        await asyncio.sleep(0)


async def test_calls_that_wait_are_bounded(
    client: SpdkClient, fake: FakeSpdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xkv_rpc.spdk.CALLS_MAX", 2)
    results = await asyncio.gather(*(client.call("any") for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(result, SpdkBusyError) for result in results) == 1


async def test_a_long_answer_is_parsed_without_holding_the_loop_or_much_memory(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    bdev = {
        "name": "Malloc",
        "aliases": ["a" * 36],
        "supported_io_types": {f"type{n}": True for n in range(150)},
    }
    answer = b'{"id":1,"result":[' + b",".join([json.dumps(bdev).encode()] * 7000) + b"]}\n"
    assert len(answer) > 17e6
    part = 1 << 20
    fake.script = sends(*[lambda _, i=i: answer[i : i + part] for i in range(0, len(answer), part)])
    loop, gaps, before = asyncio.get_running_loop(), [0.0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call = asyncio.create_task(client.call("bdev_get_bdevs"))
    last = loop.time()
    while not call.done():
        await asyncio.sleep(0.001)
        gaps.append(loop.time() - last)
        last = loop.time()
    assert len(call.result()) == 7000
    began = loop.time()
    json.loads(answer)
    # A machine that is busy with other tests adds to both.
    assert sorted(gaps)[-2] < loop.time() - began, "no longer than one parse in one go takes"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 10 * len(answer)


async def test_the_end_of_the_client_ends_a_call_that_hangs(client: SpdkClient, fake: FakeSpdk) -> None:
    asked = asyncio.Event()

    async def hangs(_: dict[str, Any], __: asyncio.StreamWriter) -> bool:
        asked.set()
        await asyncio.sleep(HANG_S)
        return True

    fake.script = hangs
    threads = threading.active_count()
    call = asyncio.create_task(client.call("any", timeout_ms=600_000))
    await asked.wait()
    client.close()
    with pytest.raises(SpdkError):
        await call
    while threading.active_count() > threads:  # noqa: ASYNC110 - a thread
        await asyncio.sleep(0.001)


async def hangs(_: dict[str, Any], __: asyncio.StreamWriter) -> bool:
    await asyncio.sleep(HANG_S)
    return True


async def test_a_call_that_waits_behind_others_that_hang_keeps_its_own_deadline(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    fake.script = hangs
    others = [asyncio.create_task(client.call("slow", timeout_ms=600_000)) for _ in range(CONNECTIONS_MAX)]
    while len(fake.calls) < CONNECTIONS_MAX:  # noqa: ASYNC110 - threads
        await asyncio.sleep(0.001)
    with pytest.raises(SpdkBusyError, match="not sent"):
        await client.call("waits", timeout_ms=50)
    fake.script = None
    client.close()
    for result in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(result, SpdkError)
    assert "waits" not in [method for method, _ in fake.calls]


async def test_after_the_end_of_the_client_every_call_fails_as_one_without_target(
    client: SpdkClient, fake: FakeSpdk
) -> None:
    fake.script = hangs
    calls = [asyncio.create_task(client.call("any", timeout_ms=600_000)) for _ in range(CONNECTIONS_MAX + 3)]
    while len(fake.calls) < CONNECTIONS_MAX:  # noqa: ASYNC110 - threads
        await asyncio.sleep(0.001)
    client.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results[CONNECTIONS_MAX:]] == [SpdkUnreachableError] * 3
    with pytest.raises(SpdkUnreachableError, match="closed"):
        await client.call("later")
    assert len(fake.calls) == CONNECTIONS_MAX


async def test_nothing_is_logged_and_no_handler_stays(
    client: SpdkClient, fake: FakeSpdk, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        await client.call("keyring_file_add_key", {"name": "k", "path": "/etc/marker"})
    assert not logging.getLogger(f"JSONRPCClient({fake.path})").handlers
    assert "marker" not in "".join(capfd.readouterr())
