"""The admin port and clients that talk slowly, or something else than HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from xkv_gateway.service import admin_http
from xkv_gateway.service.admin_http import AdminProtocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

HANG_S = 60.0
SHORT_S = 0.5
PAUSE_S = 0.02
CONNECTIONS_MAX = 8


async def _quick(_: Request) -> PlainTextResponse:
    return PlainTextResponse("quick")


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def _slow(_: Request) -> PlainTextResponse:
    await asyncio.sleep(2 * SHORT_S)
    return PlainTextResponse("slow")


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A server of the real protocol over a real socket, with a short deadline."""
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", SHORT_S)
    app = Starlette(
        routes=[Route("/quick", _quick), Route("/slow", _slow), Route("/echo", _echo, methods=["POST"])]
    )
    config = uvicorn.Config(
        app,
        http=AdminProtocol,
        log_config=None,
        lifespan="off",
        ws="none",
        loop="none",
        limit_concurrency=CONNECTIONS_MAX,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: AdminProtocol(config, server.server_state, {}), "127.0.0.1", 0
    )
    yield listening.sockets[0].getsockname()[1]
    listening.close()


async def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send the parts; returns all that comes until the server ends the connection."""
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        answer = await reader.read()
        writer.close()
        return answer


GET = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (b"GET /quick HTTP/1.1\r\nHo", 0),
        (GET, 1),
        (GET + b"GET /qui", 1),
        (GET + GET + b"G", 2),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234", 1),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234", 0),
    ],
)
async def test_who_does_not_finish_a_request_in_time_is_dropped(port: int, sent: bytes, answers: int) -> None:
    assert (await talk(port, sent)).count(b"HTTP/1.1 200") == answers


async def test_a_byte_now_and_then_does_not_prolong_the_wait(port: int) -> None:
    drops = [bytes([byte]) for byte in b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"]
    with contextlib.suppress(ConnectionError):
        assert b"200" not in await talk(port, *drops, pause_s=PAUSE_S)


async def test_a_handler_may_take_longer_than_a_sender(port: int) -> None:
    request = b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await talk(port, request)).endswith(b"slow")


async def test_a_request_in_two_parts_is_answered(port: int) -> None:
    parts = (b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\nab", b"cd")
    assert (await talk(port, *parts, pause_s=PAUSE_S)).endswith(b"abcd")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET /quick HTTP/1.1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_refused_once_in_json(port: int, sent: bytes) -> None:
    answer = await talk(port, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    document: dict[str, Any] = json.loads(body)
    assert document["error"]["code"] == "bad_request"


async def test_garbage_behind_an_answer_only_ends_the_connection(port: int) -> None:
    sent = b"GET /quick HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await talk(port, sent, b"zz\r\n", pause_s=PAUSE_S)
    assert answer.count(b"HTTP/1.1") == 1


async def test_one_connection_too_many_is_told_so_in_json_and_served_when_another_has_ended(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", HANG_S)
    last = b"GET /quick HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX - 1)]
    assert (await talk(port, last)).endswith(b"quick")
    idle.append(await asyncio.open_connection("127.0.0.1", port))
    head, _, body = (await talk(port, GET)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["error"]["code"] == "busy"
    idle.pop()[1].close()
    async with asyncio.timeout(HANG_S):
        while not (await talk(port, last)).endswith(b"quick"):  # noqa: ASYNC110 - until the end has been noticed
            await asyncio.sleep(PAUSE_S)
    for _, writer in idle:
        writer.close()
